//! `firebrick train` and `firebrick sft`.

use crate::arguments::RunArgs;
use crate::progress::Progress;
use firebrick::engine::config;
use firebrick::engine::config::Mode;
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
    let mut trainer = Trainer::builder(config)
        .mode(mode)
        .start(start)
        .observer(Progress::new())
        .build()?;
    trainer.run()?;
    Ok(())
}
