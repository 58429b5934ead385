//! Ranks that each have a stage of a model's layers (Huang et al., 2019, arXiv:1811.06965), and the ranks that have the
//! same stage: those sum gradients, and share out state.

use super::World;
use super::mesh::{Mesh, SharedModel};
use crate::{Error, Result};
use firebrick_arch::PipelineStage;
use firebrick_backends::collective::{Collective, CollectiveError, Element, Flat, Traffic};
use std::sync::Arc;

impl World {
    /// The same ranks with the layers of models in so many stages: with N ranks a stage, rank r has stage `r / N`, and
    /// is the `r % N`th of its data-parallel ranks. All ranks call it together.
    ///
    /// # Errors
    /// Where the stages do not divide the ranks, ranks share sequences or matrices, or a rank is gone.
    pub fn in_stages(mut self, stages: usize) -> Result<Self> {
        let ranks = self.size();
        if stages == 0 || !ranks.is_multiple_of(stages) {
            return Err(Error::Ranks(format!(
                "memory.pipeline_model_parallel_size is {stages}, which does not divide this run's {ranks} ranks into stages; start a \
                 multiple of {} ranks (docs/guides/multi_gpu.md), or set it to a number that divides {ranks}",
                stages.max(1)
            )));
        }
        if stages > 1 && self.sequence_size() * self.tensor_size() > 1 {
            return Err(Error::Ranks(format!(
                "memory.pipeline_model_parallel_size is {stages}, memory.tensor_model_parallel_size {} and \
                 memory.ulysses_sequence_parallel_size {}: ranks shard layers, matrices or sequences; set two of them \
                 to 1",
                self.tensor_size(),
                self.sequence_size()
            )));
        }
        self.stages = None;
        if stages > 1 {
            self.stages = Some(SharedModel {
                group: Arc::new(Mesh::across(&self.all, ranks / stages)?),
                replicas: Arc::new(Mesh::new(&self.all, ranks / stages)?),
            });
        }
        Ok(self)
    }

    /// How many stages models have; 1 where each rank has all layers.
    #[must_use]
    pub fn stages(&self) -> usize {
        self.stages.as_ref().map_or(1, |own| own.group.degree())
    }

    /// This rank's stage, where there are several.
    #[must_use]
    pub fn pipeline_stage(&self) -> Option<PipelineStage> {
        let own = self.stages.as_ref()?;
        Some(PipelineStage::new(own.group.place(), own.group.degree()))
    }

    /// Sends values to the rank that has another stage of this one's pipeline, and does not wait for it.
    ///
    /// # Errors
    /// Where there is no such stage, or the message cannot be handed over.
    pub fn send_to_stage(&self, stage: usize, own: Flat) -> Result<()> {
        self.in_pipeline(|group| group.send(stage, own))
    }

    /// Values that the rank that has another stage of this one's pipeline sends.
    ///
    /// # Errors
    /// Where a rank failed or is gone, or sends another length or type.
    pub fn receive_from_stage(&self, stage: usize, len: usize, element: Element) -> Result<Flat> {
        self.in_pipeline(|group| group.receive(stage, len, element))
    }

    /// What this rank has sent to those of its pipeline.
    #[must_use]
    pub fn pipeline_traffic(&self) -> Traffic {
        let own = self.stages.as_ref();
        own.map_or_else(Traffic::default, |own| own.group.traffic())
    }

    fn in_pipeline<T>(&self, work: impl FnOnce(&dyn Collective) -> Result<T, CollectiveError>) -> Result<T> {
        match &self.stages {
            Some(all) => Ok(all.group.during(work)?),
            None => Err(Error::Ranks("this rank has all layers, and no other stage to send to".into())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use firebrick_backends::collective::{Failure, Settings, Threads};
    use std::time::{Duration, Instant};

    fn ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
        let done = Threads::run(size, Settings::default(), |all| work(World::new(all)));
        done.into_iter().map(|rank| rank.unwrap()).collect()
    }

    fn staged(world: World) -> World {
        world.in_stages(2).unwrap()
    }

    #[test]
    fn stages_are_furthest_apart_and_ranks_of_one_stage_are_replicas() {
        let places = ranks(6, |world| {
            let world = staged(world);
            let own = || vec![world.rank() as u8];
            let same = world.replicas();
            let stage = world.pipeline_stage().unwrap();
            (
                [stage.stage(), stage.stages()],
                [world.data_rank(), world.data_size()],
                world.exchange_parts(own()).unwrap().concat(),
                same.exchange(own()).unwrap().concat(),
            )
        });
        for (rank, (stage, data, pipeline, same)) in places.into_iter().enumerate() {
            assert_eq!((stage, data), ([rank / 3, 2], [rank % 3, 3]));
            let first = (rank % 3) as u8;
            assert_eq!(pipeline, [first, first + 3]);
            let low = (rank / 3 * 3) as u8;
            assert_eq!(same, [low, low + 1, low + 2]);
        }
        let alone = World::default().in_stages(1).unwrap();
        assert!(alone.pipeline_stage().is_none() && alone.replicas().is_solo());
    }

    #[test]
    fn degrees_that_do_not_divide_the_ranks_or_go_with_others_are_refused() {
        for (size, stages) in [(1, 2), (3, 2), (2, 0)] {
            for message in ranks(size, |world| world.in_stages(stages).unwrap_err().to_string()) {
                assert!(message.contains(&format!("this run's {size} ranks")));
                assert!(message.contains(&format!("pipeline_model_parallel_size is {stages}")));
            }
        }
        for message in ranks(4, |world| {
            let world = world.sharing_matrices(2).unwrap();
            world.in_stages(2).unwrap_err().to_string()
        }) {
            assert!(message.contains("set two of them to 1"), "{message}");
        }
    }

    #[test]
    fn what_one_stage_sends_another_than_is_expected_is_an_error_that_names_both() {
        let begun = Instant::now();
        let said = ranks(2, |world| {
            let world = staged(world);
            let sent = world.send_to_stage(1, Flat::F32(vec![1.0; 3]));
            match world.rank() {
                0 => sent.and_then(|()| world.receive_from_stage(1, 1, Element::F32).map(drop)),
                _ => world.receive_from_stage(0, 4, Element::F64).map(drop),
            }
            .unwrap_err()
            .to_string()
        });
        assert!(begun.elapsed() < Duration::from_secs(1));
        let message = &said[1];
        assert!(message.contains("a send of 4 f64"), "{message}");
        assert!(message.contains("a send of 3 f32"), "{message}");
        assert!(said[0].contains("rank 1"), "{}", said[0]);
    }

    #[test]
    fn a_failure_of_a_stage_settles_on_all_ranks_and_pipelines_work_again() {
        for failing in 0..4 {
            let found = ranks(4, |world| {
                let world = staged(world);
                let other = 1 - world.pipeline_stage().unwrap().stage();
                let receive = || world.receive_from_stage(other, 1, Element::F64);
                let told = if world.rank() == failing {
                    world.agree_on_failure(Some(Failure::new("no room")))
                } else {
                    // what it waits for comes from the rank that failed, or from one that does not come this far either
                    let done = receive();
                    world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
                };
                let own = Flat::F64(vec![world.rank() as f64]);
                world.send_to_stage(other, own).unwrap();
                (told.unwrap_err().to_string(), receive().unwrap())
            });
            for (rank, (told, received)) in found.into_iter().enumerate() {
                assert_eq!(told, format!("rank {failing} failed: no room"));
                assert_eq!(received, Flat::F64(vec![((rank + 2) % 4) as f64]));
            }
        }
    }
}
