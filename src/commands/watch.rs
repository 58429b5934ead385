//! `firebrick watch`: the live view of a run in another process, or of one that has ended.

use crate::arguments::WatchArgs;
use crate::live::{LiveState, Theme, UpdateSource, can_show, picture, show};
use crate::output;
use firebrick::report::Follower;
use std::time::{Duration, Instant};

/// Interval of polling the run folder.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

pub fn run(args: &WatchArgs) -> anyhow::Result<()> {
    let mut follower = Follower::open(&args.run)?;
    let mut state = LiveState::new(true);
    if !args.once && args.size.is_none() && can_show() {
        return show(state, followed(follower), Theme::from_environment());
    }
    for update in follower.poll()? {
        state.apply(update);
    }
    state.silent = follower.silent_for();
    let (columns, rows) = args.size.unwrap_or_default().0;
    output::print(&picture(&state, columns, rows)?)
}

/// Updates of a folder at intervals.
fn followed(mut follower: Follower) -> UpdateSource {
    let mut polled: Option<Instant> = None;
    Box::new(move |state| {
        if polled.is_some_and(|at| at.elapsed() < POLL_INTERVAL) {
            return Ok(Some(Vec::new()));
        }
        polled = Some(Instant::now());
        let updates = follower.poll()?;
        state.silent = follower.silent_for();
        Ok(Some(updates))
    })
}
