//! `firebrick train` and `firebrick sft`.

use super::{dry_run, load_config};
use crate::arguments::RunArgs;
use crate::console::{Console, Show};
use crate::signals::RunSignals;
use crate::{EXIT_HUNG, live, log, output};
use firebrick::backends::collective::{Collective, Launch, Settings, launched_world};
use firebrick::engine::config::{Logger, Mode};
use firebrick::engine::metrics::profile::Profiler;
use firebrick::engine::trainer::{Hang, Start, Trainer};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

/// Time for the message of a hang to be written; after three times as much the process is aborted.
const HANG_TIMEOUT: Duration = Duration::from_secs(2);

/// Trains. Returns false if the run was stopped before its last step.
pub fn run(args: &RunArgs, mode: Mode) -> anyhow::Result<bool> {
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
            return Ok(true);
        }
        return dry_run::run(Trainer::builder(config).mode(mode)).map(|()| true);
    }
    let world = launched_world(settings(config.trainer.heartbeat_timeout));
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
    let signals = RunSignals::begin(&config, mode, (world.size() > 1).then_some(rank));
    let console = Console::new(show, args.plain, &config, mode, signals);
    let summary = Trainer::builder(config)
        .mode(mode)
        .start(start(args))
        .profile(args.profile)
        .observer(console)
        .on_hang(end_hung)
        .world(Arc::clone(&world))
        .run()
        .map_err(|error| with_rank(&world, error))?;
    if rank == 0 && show != Show::Warnings && args.profile > 0 && trace.exists() {
        output::message(&format!("profile: open {} at https://ui.perfetto.dev", trace.display()));
    }
    let stopped = summary.filter(|summary| summary.steps < summary.max_steps);
    if let Some(summary) = &stopped {
        tracing::warn!("stopped after step {} of {}; continue with --resume", summary.steps, summary.max_steps);
    }
    Ok(stopped.is_none())
}

/// A deadline of ranks behind that of their watchdogs.
fn settings(heartbeat_timeout: Option<f64>) -> Settings {
    let settings = Settings::default();
    let timeout = heartbeat_timeout.and_then(|seconds| Duration::try_from_secs_f64(2.0 * seconds).ok());
    Settings { deadline: settings.deadline.max(timeout.unwrap_or_default()), ..settings }
}

/// Ends a process whose training thread does not. Terminal and stderr may block too, and so may the handlers that the
/// system runs at the end of a process.
fn end_hung(hang: &Hang) {
    std::thread::spawn(|| {
        std::thread::sleep(3 * HANG_TIMEOUT);
        std::process::abort();
    });
    let (message, (done, written)) = (format!("error: {hang}"), channel());
    std::thread::spawn(move || {
        live::restore();
        output::message(&output::printable(&message));
        done.send(())
    });
    let _ = written.recv_timeout(HANG_TIMEOUT);
    hang.kill_processes();
    std::process::exit(i32::from(EXIT_HUNG));
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
