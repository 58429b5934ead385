//! `firebrick replay`.

use super::{UserError, load_config};
use crate::arguments::ReplayArgs;
use crate::output;
use firebrick::backends::collective::{Launch, Settings, launched_world};
use firebrick::engine::checkpoint::RunDir;
use firebrick::engine::trainer::{Difference, replay};

/// A replay that differs from its run.
#[derive(Debug, thiserror::Error)]
#[error("the replay differs from the run: {0}")]
pub struct Differs(Difference);

pub fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    if !RunDir::holds_run(&args.run) {
        let run = args.run.display();
        return Err(UserError(format!("{run} contains no run (no config.yaml); name the run's `output`")).into());
    }
    let mut config = load_config(&args.run.join("config.yaml"), &[], None)?;
    if let Some(launch) = Launch::from_environment().filter(|launch| launch.size > 1) {
        config.device = config.device.for_local_rank(launch.local_rank);
    }
    let world = launched_world(Settings::default());
    let world = world.map_err(|error| firebrick::Error::Ranks(error.to_string()))?;
    let rank = world.rank();
    let replay = replay(config, &args.run, args.step, world)?;
    if let Some(difference) = replay.difference {
        return Err(Differs(difference).into());
    }
    if rank == 0 {
        let from = match replay.from {
            0 => "the beginning of the run".to_owned(),
            from => format!("the checkpoint of step {from}"),
        };
        let weights = match replay.tensors {
            0 => "no tensors, because the step has no checkpoint".to_owned(),
            tensors => format!("{tensors} tensors"),
        };
        let (step, metrics, samples) = (args.step, replay.metrics, replay.samples);
        output::print(&format!(
            "step {step}, replayed from {from}, is identical: {metrics} metrics, {samples} samples, {weights}\n"
        ))?;
    }
    Ok(())
}
