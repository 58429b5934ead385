//! A run on several ranks: what is refused, and what the ranks compare.

use super::Trainer;
use super::setup::{Opened, Planned};
use crate::config::{RunConfig, TrainerConfig};
use crate::metrics::{Control, Metrics, StepReport, is_of_a_machine, metrics};
use crate::task::Rewards;
use crate::world::World;
use crate::world::codec::{Reader, Writer};
use crate::{Error, Result};
use firebrick_backends::{DeviceInfo, DeviceSpec};
use firebrick_spec::Backend;

/// What to do where ranks are not alike.
const START_ALIKE: &str =
    "start every rank with the same program, configuration, data and kind of device";

/// Refuses a world of another size than `trainer.nnodes` and `trainer.n_gpus_per_node` say.
pub(super) fn check_size(config: &TrainerConfig, world: &World) -> Result<()> {
    let TrainerConfig {
        nnodes,
        n_gpus_per_node,
        ..
    } = config;
    if nnodes.is_none() && n_gpus_per_node.is_none() {
        return Ok(());
    }
    let (nodes, gpus) = (nnodes.unwrap_or(1), n_gpus_per_node.unwrap_or(1));
    let found = world.size();
    if nodes * gpus == found {
        return Ok(());
    }
    Err(Error::Ranks(format!(
        "trainer.nnodes is {nodes} and trainer.n_gpus_per_node is {gpus}, {} ranks in all, and this run has {found}; start it with \
         `mpirun -n {} firebrick train …` (docs/clusters.md), or leave both keys out",
        nodes * gpus,
        nodes * gpus
    )))
}

/// Refuses a device of which several ranks make nothing, and devices of several kinds.
pub(super) fn check_device(world: &World, asked: DeviceSpec, info: &DeviceInfo) -> Result<()> {
    if world.is_solo() {
        return Ok(());
    }
    let backend = info.device.backend();
    if backend == Backend::Cuda && asked == DeviceSpec::Auto {
        return Err(Error::Ranks(
            "`device: auto` chooses the same card on every rank of a machine; set `device: cuda`, with which the ranks of a machine take \
             its cards one after the other"
                .into(),
        ));
    }
    if !matches!(backend, Backend::Cpu | Backend::Cuda) {
        return Err(Error::Ranks(format!(
            "{} ranks on {}: several ranks compute on `device: cpu` or `device: cuda`; choose one of these, or start one rank",
            world.size(),
            info.device
        )));
    }
    world.same(
        "the kind of device",
        START_ALIKE,
        format!("{backend:?}").as_bytes(),
    )
}

impl Opened {
    /// Refuses, before anything is loaded, what several ranks do not do, and ranks that do not do the same.
    pub fn check_ranks(&self, planned: &Planned) -> Result<()> {
        let world = &self.world;
        if world.is_solo() {
            return Ok(());
        }
        let refuse = |what: String| Err(Error::Ranks(what));
        if planned
            .plan
            .models
            .values()
            .any(|model| model.optimizer.in_backward)
        {
            return refuse(
                "memory.step_in_backward updates a unit before other ranks have its gradient; set it to false, or start one rank".into(),
            );
        }
        let rewards = self.data.prompts.task().rewards();
        if rewards.is_some_and(Rewards::normalizes) {
            return refuse(
                "a reward with `normalize: true` is normalised by statistics of all completions in their order, and each rank judges \
                 its own; set it to false, normalise advantages instead (objective.adv_estimator), or start one rank"
                    .into(),
            );
        }
        let plan = serde_json::to_vec(&planned.plan).unwrap_or_default();
        world.same("the memory plan", START_ALIKE, &plan)?;
        world.same(
            "the configuration",
            START_ALIKE,
            self.compared().to_yaml()?.as_bytes(),
        )
    }

    /// What has to be the same on every rank.
    fn compared(&self) -> RunConfig {
        RunConfig {
            // a number of its own on every rank
            device: DeviceSpec::Auto,
            ..self.config.clone()
        }
    }
}

impl Trainer {
    /// What the observer of rank 0 asks for.
    pub(super) fn asked(&mut self) -> Result<Control> {
        const ALL: [Control; 4] = [
            Control::Continue,
            Control::Pause,
            Control::Save,
            Control::Stop,
        ];
        let own = self.recorder.control();
        if self.world.is_solo() {
            return Ok(own);
        }
        let said = self.world.of_main(vec![own as u8])?;
        let place = said.first().map_or(0, |&place| usize::from(place));
        Ok(ALL[place.min(ALL.len() - 1)])
    }

    /// Refuses to go on where a metric of a step is not the same on every rank, times and memory apart: ranks that have drifted apart
    /// train different models.
    pub(super) fn compare(&self, report: &StepReport) -> Result<()> {
        if self.world.is_solo() {
            return Ok(());
        }
        let mut own: Metrics = metrics(report);
        own.retain(|name, _| !is_of_a_machine(name));
        let mut bytes = Writer::default();
        write(&mut bytes, &own);
        let advice = "the ranks have drifted apart; resume from the last checkpoint, and report it with the configuration";
        let same = self
            .world
            .same("a metric of the step", advice, &bytes.into_bytes());
        let Err(Error::Ranks(message)) = same else {
            return same;
        };
        // every rank is here
        let all = self.world.gather(
            |w| write(w, &own),
            |r| r.list(|r: &mut Reader<'_>| Ok((r.text()?, r.float()?))),
        )?;
        let other = all.iter().enumerate().find_map(|(rank, metrics)| {
            let pairs = all[0].iter().zip(metrics);
            let mut different = pairs.filter(|(a, b)| a.0 != b.0 || a.1.to_bits() != b.1.to_bits());
            different.next().map(|(a, b)| {
                format!(
                    "{} is {} on rank 0 and {} is {} on rank {rank}",
                    a.0, a.1, b.0, b.1
                )
            })
        });
        Err(Error::Ranks(format!(
            "step {}: {message} ({})",
            report.step,
            other.unwrap_or_else(|| "their numbers differ".into())
        )))
    }
}

fn write(to: &mut Writer, metrics: &Metrics) {
    to.list(metrics.iter(), |w, (name, value)| {
        w.text(name);
        w.float(*value);
    });
}
