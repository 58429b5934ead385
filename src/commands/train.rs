//! `firebrick train` and `firebrick sft`.

use super::{dry_run, load_config};
use crate::arguments::RunArgs;
use crate::console::{Console, Show};
use crate::{log, output};
use firebrick::backends::collective::{Collective, Launch, Settings, launched_world};
use firebrick::engine::config::{Logger, Mode};
use firebrick::engine::metrics::profile::Profiler;
use firebrick::engine::trainer::{Start, Trainer};
use std::sync::Arc;

pub fn run(args: &RunArgs, mode: Mode) -> anyhow::Result<()> {
    let mut config = load_config(&args.config, &args.overrides, args.device)?;
    let launch = Launch::from_environment().filter(|launch| launch.size > 1);
    if let Some(launch) = launch {
        config.device = config.device.for_local_rank(launch.local_rank);
    }
    if let Some(plan) = &args.plan {
        let absolute = std::path::absolute(plan);
        config.memory.plan = Some(absolute.unwrap_or_else(|_| plan.clone()));
    }
    if args.dry_run {
        // only one rank prints
        if launch.is_some_and(|launch| launch.rank > 0) {
            return Ok(());
        }
        return dry_run::run(Trainer::builder(config).mode(mode));
    }
    let world = launched_world(Settings::default());
    let world = world.map_err(|error| firebrick::Error::Ranks(error.to_string()))?;
    let rank = world.rank();
    let show = if rank > 0 {
        log::set_rank(rank);
        Show::Nothing
    } else if config.trainer.logger.has(Logger::Console) {
        Show::new(args)
    } else {
        Show::Warnings
    };
    let trace = config.output.join(Profiler::FILE);
    let console = Console::new(show, args.plain, &config, mode);
    Trainer::builder(config)
        .mode(mode)
        .start(start(args))
        .profile(args.profile)
        .observer(console)
        .world(Arc::clone(&world))
        .run()
        .map_err(|error| with_rank(&world, error))?;
    if rank == 0 && show != Show::Warnings && args.profile > 0 && trace.exists() {
        output::message(&format!("profile: open {} at https://ui.perfetto.dev", trace.display()));
    }
    Ok(())
}

fn start(args: &RunArgs) -> Start {
    match (args.resume, args.allow_changed_inputs) {
        (false, _) => Start::Fresh,
        (true, false) => Start::Resume,
        (true, true) => Start::ResumeChanged,
    }
}

/// An error of a run, with its rank if there are several.
fn with_rank(world: &Arc<dyn Collective>, error: firebrick::Error) -> anyhow::Error {
    let error = anyhow::Error::new(error);
    if world.size() == 1 {
        return error;
    }
    error.context(format!("rank {}", world.rank()))
}
