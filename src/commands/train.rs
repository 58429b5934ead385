//! `firebrick train` and `firebrick sft`.

use super::dry_run;
use crate::arguments::RunArgs;
use crate::console::{Console, Show};
use crate::output;
use firebrick::engine::config;
use firebrick::engine::config::{Logger, Mode};
use firebrick::engine::metrics::profile::Profiler;
use firebrick::engine::trainer::{Start, Trainer};

pub fn run(args: &RunArgs, mode: Mode, start: Start) -> anyhow::Result<()> {
    let mut config = config::load(&args.config, &args.overrides)?;
    if let Some(device) = args.device {
        config.device = device;
    }
    if let Some(plan) = &args.plan {
        let absolute = std::path::absolute(plan);
        config.memory.plan = Some(absolute.unwrap_or_else(|_| plan.clone()));
    }
    if args.dry_run {
        return dry_run::run(Trainer::builder(config).mode(mode));
    }
    let show = if config.trainer.logger.has(Logger::Console) {
        Show::of(args)
    } else {
        Show::Warnings
    };
    let trace = config.output.join(Profiler::FILE);
    let console = Console::new(show, args.plain, &config, mode);
    let mut trainer = Trainer::builder(config)
        .mode(mode)
        .start(start)
        .profile(args.profile)
        .observer(console)
        .build()?;
    trainer.run()?;
    if show != Show::Warnings && args.profile > 0 && trace.exists() {
        output::message(&format!(
            "profile: open {} at https://ui.perfetto.dev",
            trace.display()
        ));
    }
    Ok(())
}
