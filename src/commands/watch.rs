//! `firebrick watch`: the live view of a run in another process, or of one that has ended.

use crate::arguments::WatchArgs;
use crate::live::{LiveState, Theme, UpdateSource, can_show, picture, show};
use crate::output;
use firebrick::report::Follower;
use std::time::{Duration, Instant};

/// Time between two looks into the run folder.
const LOOK: Duration = Duration::from_millis(500);

pub fn run(args: &WatchArgs) -> anyhow::Result<()> {
    let mut follower = Follower::open(&args.run)?;
    let mut state = LiveState::new(true);
    if !args.once && args.size.is_none() && can_show() {
        return show(state, followed(follower), Theme::of_environment());
    }
    for news in follower.poll()? {
        state.apply(news);
    }
    state.silent = follower.silent_for();
    let (columns, rows) = args.size.unwrap_or_default().0;
    output::print(&picture(&state, columns, rows)?)
}

/// What a folder says from time to time.
fn followed(mut follower: Follower) -> UpdateSource {
    let mut looked: Option<Instant> = None;
    Box::new(move |state| {
        if looked.is_some_and(|at| at.elapsed() < LOOK) {
            return Ok(Some(Vec::new()));
        }
        looked = Some(Instant::now());
        let news = follower.poll()?;
        state.silent = follower.silent_for();
        Ok(Some(news))
    })
}
