use super::super::World;
use super::{CRITIC_SEQUENCES, SEQUENCES};
use crate::Result;
use burn::tensor::{Device, Tensor};
use firebrick_backends::collective::{Element, Failure, Flat, OperationKind, Settings, Threads};
use firebrick_models::TensorRanks;
use firebrick_plan::Zero;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
    let done = Threads::run(size, Settings::default(), |ranks| work(World::new(ranks)));
    done.into_iter().map(|rank| rank.unwrap()).collect()
}

fn shared(world: World) -> World {
    world.with_tensor_parallel(2).unwrap()
}

fn staged(world: World) -> World {
    world.with_pipeline_stages(2).unwrap()
}

#[test]
fn consecutive_ranks_share_sequences_and_groups_divide_the_batch() {
    let places = ranks(6, |world| {
        let world = world.with_sequence_parallel(2).unwrap();
        let group = world.sequence_ranks().exchange(vec![world.rank() as u8]).unwrap();
        let sent = world.sequence_traffic().operations[OperationKind::Exchange as usize];
        let data = [world.data_rank(), world.data_size()];
        let sequence = [world.sequence_rank(), world.sequence_size()];
        (data, sequence, group.concat(), sent)
    });
    for (rank, (data, sequence, group, sent)) in places.into_iter().enumerate() {
        assert_eq!((data, sequence), ([rank / 2, 3], [rank % 2, 2]));
        let low = (rank / 2 * 2) as u8;
        assert_eq!((group, sent), (vec![low, low + 1], 1));
    }
    let alone = World::default().with_sequence_parallel(1).unwrap();
    assert_eq!((alone.data_size(), alone.sequence_size()), (1, 1));
}

#[test]
fn ranks_share_the_critics_sequences_in_groups_of_their_own() {
    for (policy, critic) in [(1, 2), (2, 1), (2, 4), (2, 2)] {
        let places = ranks(4, |world| {
            let world = world.with_sequence_parallel(policy).unwrap().with_critic_sequence_parallel(critic).unwrap();
            [world.clone(), world.for_critic()].map(|world| {
                let group = world.sequence_ranks().exchange(vec![world.rank() as u8]).unwrap();
                let data = [world.data_rank(), world.data_size()];
                (group.concat(), data, world.sequence_key())
            })
        });
        for (rank, degrees) in places.into_iter().enumerate() {
            for (degree, (group, data, _)) in [policy, critic].into_iter().zip(&degrees) {
                let low = rank / degree * degree;
                let members: Vec<u8> = (low..low + degree).map(|r| r as u8).collect();
                assert_eq!(*group, members, "{policy} and {critic}");
                assert_eq!(*data, [rank / degree, 4 / degree]);
            }
            assert_eq!(degrees[0].2, SEQUENCES);
            assert_eq!(degrees[1].2 == CRITIC_SEQUENCES, policy != critic);
        }
    }
}

#[test]
fn a_critics_degree_that_cannot_be_is_refused_by_its_key() {
    let refused = |world: Result<World>| world.unwrap_err().to_string();
    for degree in [0, 2] {
        let message = refused(World::default().with_critic_sequence_parallel(degree));
        let expected = format!("{CRITIC_SEQUENCES} is {degree}");
        assert!(message.contains(&expected) && message.contains("1 ranks"), "{message}");
    }
    for message in ranks(2, |world| {
        let world = world.with_tensor_parallel(2).unwrap();
        refused(world.with_critic_sequence_parallel(2))
    }) {
        assert!(message.contains("memory.tensor_model_parallel_size 2"), "{message}");
    }
}

#[test]
fn a_degree_that_does_not_divide_the_ranks_is_refused() {
    for (degree, ranks) in [(2, 1), (0, 1)] {
        let message = World::default().with_sequence_parallel(degree).unwrap_err().to_string();
        let expected = format!("{SEQUENCES} is {degree}");
        assert!(message.contains(&expected), "{message}");
        assert!(message.contains(&format!("{ranks} ranks")), "{message}");
    }
    for message in ranks(3, |world| world.with_sequence_parallel(2).unwrap_err().to_string()) {
        assert!(message.contains("3 ranks"), "{message}");
        assert!(message.contains("a multiple of 2"), "{message}");
    }
}

#[test]
fn a_failure_of_a_rank_that_shares_sequences_settles_on_all_and_groups_work_again() {
    for failing in 0..4 {
        let outcomes = ranks(4, |world| {
            let world = world.with_sequence_parallel(2).unwrap();
            // a critic whose ranks are alone, or all of them
            let critic = if failing % 2 == 0 { 4 } else { 1 };
            let world = world.with_critic_sequence_parallel(critic).unwrap();
            let values = || Flat::F64(vec![world.rank() as f64; 2]);
            let blocks = || Tensor::<1>::from_floats([world.rank() as f32; 2], &Device::flex());
            let told = if world.rank() == failing {
                world.agree_on_failure(Some(Failure::new("no room")))
            } else {
                // either an operation of its group was cut short, or that of all is
                let done = world.sequence_ranks().all_to_all_tensor(blocks());
                let done = done.and_then(|_| world.all_reduce(values()));
                world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
            };
            let anew = world.sequence_ranks().all_to_all_tensor(blocks()).unwrap();
            let anew: Vec<f32> = anew.into_data().iter().collect();
            let rank = vec![world.rank() as u8];
            let group = world.for_critic().sequence_ranks().exchange(rank).unwrap();
            assert_eq!(group.len(), critic);
            (told.unwrap_err().to_string(), anew)
        });
        for (rank, (told, anew)) in outcomes.into_iter().enumerate() {
            assert_eq!(told, format!("rank {failing} failed: no room"));
            let low = (rank / 2 * 2) as f32;
            assert_eq!(anew, [low, low + 1.0]);
        }
    }
}

#[test]
fn consecutive_ranks_share_matrices_and_those_of_one_place_have_the_same() {
    let places = ranks(6, |world| {
        let world = shared(world);
        let rank = || vec![world.rank() as u8];
        let same = world.replicas();
        let partition = same.partition(Zero::Stage1);
        (
            [world.tensor_ranks().rank(), world.tensor_size()],
            [world.data_rank(), world.data_size()],
            world.tensor_ranks().exchange(rank()).unwrap().concat(),
            same.exchange(rank()).unwrap().concat(),
            [same.rank(), same.size(), partition.ranks()],
        )
    });
    for (rank, (tensor, data, group, same, place)) in places.into_iter().enumerate() {
        assert_eq!((tensor, data), ([rank % 2, 2], [rank / 2, 3]));
        let low = (rank / 2 * 2) as u8;
        assert_eq!(group, [low, low + 1]);
        let first = (rank % 2) as u8;
        assert_eq!(same, [first, first + 2, first + 4]);
        assert_eq!(place, [rank / 2, 3, 3]);
    }
    let alone = World::default().with_tensor_parallel(1).unwrap();
    assert!(alone.tensor_share().is_none() && alone.replicas().is_solo());
    let refused = World::default().with_tensor_parallel(2).unwrap_err();
    assert!(refused.to_string().contains("this run's 1 ranks"));
}

#[test]
fn a_rank_that_waits_for_one_that_was_told_of_a_failure_is_told_too() {
    let errors = ranks(4, |world| {
        let world = shared(world);
        let values = || Flat::F64(vec![world.rank() as f64]);
        let told = match world.rank() {
            0 => world.agree_on_failure(Some(Failure::new("no room"))),
            // its group's sum is cut short, and the others wait for it among those of its place
            1 => {
                let done = world.tensor_ranks().all_reduce(values());
                world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
            }
            _ => {
                let done = world.replicas().all_reduce(values());
                world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
            }
        };
        told.unwrap_err().to_string()
    });
    assert!(errors.iter().all(|told| told == "rank 0 failed: no room"));
}

#[test]
fn a_failure_in_either_group_settles_on_all_ranks_and_groups_work_again() {
    for (failing, across) in [(0, false), (3, false), (1, true), (2, true)] {
        let outcomes = ranks(4, |world| {
            let world = shared(world);
            let values = || Flat::F64(vec![world.rank() as f64]);
            let sum = |world: &World| {
                if across { world.replicas().all_reduce(values()) } else { world.tensor_ranks().all_reduce(values()) }
            };
            let told = if world.rank() == failing {
                world.agree_on_failure(Some(Failure::new("no room")))
            } else {
                let done = sum(&world);
                world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
            };
            (told.unwrap_err().to_string(), sum(&world).unwrap())
        });
        for (rank, (told, sum)) in outcomes.into_iter().enumerate() {
            assert_eq!(told, format!("rank {failing} failed: no room"));
            let pair = if across { rank % 2 * 2 + 2 } else { rank / 2 * 4 + 1 };
            assert_eq!(sum, Flat::F64(vec![pair as f64]));
        }
    }
}

#[test]
fn stages_are_furthest_apart_and_ranks_of_one_stage_are_replicas() {
    let places = ranks(6, |world| {
        let world = staged(world);
        let rank = || vec![world.rank() as u8];
        let same = world.replicas();
        let stage = world.pipeline_stage().unwrap();
        (
            [stage.stage(), stage.stages()],
            [world.data_rank(), world.data_size()],
            world.part_ranks().exchange(rank()).unwrap().concat(),
            same.exchange(rank()).unwrap().concat(),
        )
    });
    for (rank, (stage, data, pipeline, same)) in places.into_iter().enumerate() {
        assert_eq!((stage, data), ([rank / 3, 2], [rank % 3, 3]));
        let first = (rank % 3) as u8;
        assert_eq!(pipeline, [first, first + 3]);
        let low = (rank / 3 * 3) as u8;
        assert_eq!(same, [low, low + 1, low + 2]);
    }
    let alone = World::default().with_pipeline_stages(1).unwrap();
    assert!(alone.pipeline_stage().is_none() && alone.replicas().is_solo());
}

#[test]
fn degrees_that_do_not_divide_the_ranks_or_go_with_others_are_refused() {
    for (size, stages) in [(1, 2), (3, 2), (2, 0)] {
        for message in ranks(size, |world| world.with_pipeline_stages(stages).unwrap_err().to_string()) {
            assert!(message.contains(&format!("this run's {size} ranks")));
            assert!(message.contains(&format!("pipeline_model_parallel_size is {stages}")));
        }
    }
    for message in
        ranks(4, |world| world.with_tensor_parallel(2).unwrap().with_pipeline_stages(2).unwrap_err().to_string())
    {
        assert!(message.contains("set two of them to 1"), "{message}");
    }
}

#[test]
fn what_one_stage_sends_another_than_is_expected_is_an_error_that_names_both() {
    let begun = Instant::now();
    let errors = ranks(2, |world| {
        let world = staged(world);
        let sent = world.part_ranks().send(1, Flat::F32(vec![1.0; 3]));
        match world.rank() {
            0 => sent.and_then(|()| world.part_ranks().receive(1, 1, Element::F32).map(drop)),
            _ => world.part_ranks().receive(0, 4, Element::F64).map(drop),
        }
        .unwrap_err()
        .to_string()
    });
    assert!(begun.elapsed() < Duration::from_secs(1));
    let message = &errors[1];
    assert!(message.contains("a send of 4 f64"), "{message}");
    assert!(message.contains("a send of 3 f32"), "{message}");
    assert!(errors[0].contains("rank 1"), "{}", errors[0]);
}

#[test]
fn a_failure_of_a_stage_settles_on_all_ranks_and_pipelines_work_again() {
    for failing in 0..4 {
        let outcomes = ranks(4, |world| {
            let world = staged(world);
            let other = 1 - world.pipeline_stage().unwrap().stage();
            let receive = || world.part_ranks().receive(other, 1, Element::F64);
            let told = if world.rank() == failing {
                world.agree_on_failure(Some(Failure::new("no room")))
            } else {
                // what it waits for comes from the rank that failed, or from one that does not come this far either
                let done = receive();
                world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
            };
            let values = Flat::F64(vec![world.rank() as f64]);
            world.part_ranks().send(other, values).unwrap();
            (told.unwrap_err().to_string(), receive().unwrap())
        });
        for (rank, (told, received)) in outcomes.into_iter().enumerate() {
            assert_eq!(told, format!("rank {failing} failed: no room"));
            assert_eq!(received, Flat::F64(vec![((rank + 2) % 4) as f64]));
        }
    }
}

#[test]
fn consecutive_ranks_sample_together_whoever_shares_sequences() {
    let places = ranks(8, |world| {
        let world = world.with_sequence_parallel(2).unwrap().with_rollout_tensor_parallel(4).unwrap();
        let group = [world.sampling_group(), world.sampling_groups()];
        (group, [world.sampling_rank(), world.sampling_size()], world.sequence_size())
    });
    for (rank, place) in places.into_iter().enumerate() {
        assert_eq!(place, ([rank / 4, 2], [rank % 4, 4], 2));
    }
    let alone = World::default().with_rollout_tensor_parallel(1).unwrap();
    assert!(alone.tensor_group().is_none());
    let refused = World::default().with_rollout_tensor_parallel(2).unwrap_err().to_string();
    assert!(refused.contains("this run's 1 ranks"), "{refused}");
}

#[test]
fn a_failure_in_a_group_settles_on_all_ranks_and_groups_work_again() {
    for failing in 0..4 {
        let outcomes = ranks(4, |world| {
            let world = world.with_rollout_tensor_parallel(2).unwrap();
            let group = || Arc::clone(world.sampling.as_ref().unwrap());
            let value = || Tensor::<1>::from_floats([world.rank() as f32], &Device::flex());
            let told = if world.rank() == failing {
                world.agree_on_failure(Some(Failure::new("no room")))
            } else {
                let done = group().all_reduce(value());
                world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
            };
            let anew: Vec<f32> = group().all_gather(value()).unwrap().into_data().iter().collect();
            (told.unwrap_err().to_string(), anew)
        });
        for (rank, (told, anew)) in outcomes.into_iter().enumerate() {
            assert_eq!(told, format!("rank {failing} failed: no room"));
            let low = (rank / 2 * 2) as f32;
            assert_eq!(anew, [low, low + 1.0]);
        }
    }
}
