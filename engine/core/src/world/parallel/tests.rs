use super::*;
use burn::tensor::Device;
use firebrick_backends::collective::{Element, Failure, OperationKind, Settings, Threads};
use firebrick_plan::Zero;
use std::time::{Duration, Instant};

fn ranks<T: Send>(size: usize, work: impl Fn(World) -> T + Sync) -> Vec<T> {
    let done = Threads::run(size, Settings::default(), |all| work(World::new(all)));
    done.into_iter().map(|rank| rank.unwrap()).collect()
}

fn number(world: &World) -> Flat {
    Flat::F64(vec![world.rank() as f64])
}

fn name(world: &World) -> Vec<u8> {
    vec![world.rank() as u8]
}

#[test]
fn consecutive_ranks_share_sequences_and_groups_divide_the_batch() {
    let places = ranks(6, |world| {
        let world = world.sharing_sequences(2).unwrap();
        let members = world.sequence_group().exchange(name(&world)).unwrap();
        let sent = world.sequence_traffic().operations[OperationKind::Exchange as usize];
        let data = [world.data_rank(), world.data_size()];
        let sequence = [world.sequence_group().rank(), world.sequence_size()];
        (data, sequence, members.concat(), sent)
    });
    for (rank, (data, sequence, members, sent)) in places.into_iter().enumerate() {
        assert_eq!((data, sequence), ([rank / 2, 3], [rank % 2, 2]));
        let low = (rank / 2 * 2) as u8;
        assert_eq!((members, sent), (vec![low, low + 1], 1));
    }
    let alone = World::default().sharing_sequences(1).unwrap();
    assert_eq!((alone.data_size(), alone.sequence_size()), (1, 1));
}

#[test]
fn critic_sequences_have_groups_of_their_degree() {
    for (policy, critic) in [(1, 2), (2, 1), (2, 4), (2, 2)] {
        let places = ranks(4, |world| {
            let world = world.sharing_sequences(policy).unwrap();
            let world = world.sharing_critic_sequences(critic).unwrap();
            [world.clone(), world.of_critic()].map(|world| {
                let members = world.sequence_group().exchange(name(&world)).unwrap();
                let data = [world.data_rank(), world.data_size()];
                (members.concat(), data, world.sequence_key())
            })
        });
        for (rank, models) in places.into_iter().enumerate() {
            for (degree, (members, data, _)) in [policy, critic].into_iter().zip(&models) {
                let low = rank / degree * degree;
                let expected: Vec<u8> = (low..low + degree).map(|r| r as u8).collect();
                assert_eq!(*members, expected, "{policy} and {critic}");
                assert_eq!(*data, [rank / degree, 4 / degree]);
            }
            assert_eq!(models[0].2, SEQUENCE_KEY);
            assert_eq!(models[1].2 == CRITIC_KEY, policy != critic);
        }
    }
}

#[test]
fn consecutive_ranks_share_matrices_and_those_of_one_index_have_the_same() {
    let places = ranks(6, |world| {
        let world = world.sharing_matrices(2).unwrap();
        let same = world.replicas();
        let partition = same.partition(Zero::Stage1);
        (
            [world.group(Dim::Tensor).rank(), world.tensor_size()],
            [world.data_rank(), world.data_size()],
            world.group(Dim::Tensor).exchange(name(&world)).unwrap().concat(),
            same.exchange(name(&world)).unwrap().concat(),
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
    let alone = World::default().sharing_matrices(1).unwrap();
    assert!(alone.tensor_share().is_none() && alone.replicas().is_solo());
}

#[test]
fn stages_are_furthest_apart_and_ranks_of_one_stage_are_replicas() {
    let places = ranks(6, |world| {
        let world = world.in_stages(2).unwrap();
        let stage = world.pipeline_stage().unwrap();
        (
            [stage.stage(), stage.stages()],
            [world.data_rank(), world.data_size()],
            world.model_group().exchange(name(&world)).unwrap().concat(),
            world.replicas().exchange(name(&world)).unwrap().concat(),
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
fn consecutive_ranks_sample_together_with_any_sequence_degree() {
    let places = ranks(8, |world| {
        let world = world.sharing_sequences(2).unwrap();
        let world = world.sampling_together(4).unwrap();
        let group = [world.sampling_group(), world.sampling_groups()];
        (group, [world.sampling_rank(), world.sampling_size()], world.sequence_size())
    });
    for (rank, place) in places.into_iter().enumerate() {
        assert_eq!(place, ([rank / 4, 2], [rank % 4, 4], 2));
    }
    let alone = World::default().sampling_together(1).unwrap();
    assert!(alone.tensor_group().is_none());
}

/// Forms the groups of a key.
type Split = fn(World, usize) -> Result<World>;

const SPLITS: [(&str, Split); 5] = [
    (SEQUENCE_KEY, World::sharing_sequences),
    (CRITIC_KEY, World::sharing_critic_sequences),
    (TENSOR_KEY, World::sharing_matrices),
    (PIPELINE_KEY, World::in_stages),
    (SAMPLING_KEY, World::sampling_together),
];

#[test]
fn a_degree_that_does_not_divide_the_ranks_is_refused_by_its_key() {
    for (key, split) in SPLITS {
        for (size, degree) in [(1, 2), (1, 0), (3, 2)] {
            for message in ranks(size, |world| split(world, degree).unwrap_err().to_string()) {
                assert!(message.contains(&format!("{key} is {degree}")), "{message}");
                assert!(message.contains(&format!("this run's {size} ranks")), "{message}");
                assert!(message.contains(&format!("a multiple of {}", degree.max(1))), "{message}");
            }
        }
    }
}

#[test]
fn degrees_that_exclude_each_other_are_refused() {
    let tensor = |world: World| world.sharing_matrices(2).unwrap();
    for message in ranks(2, |world| tensor(world).sharing_critic_sequences(2).unwrap_err().to_string()) {
        assert!(message.contains("memory.tensor_model_parallel_size 2"), "{message}");
    }
    for message in ranks(4, |world| tensor(world).in_stages(2).unwrap_err().to_string()) {
        assert!(message.contains("set two of them to 1"), "{message}");
    }
    for message in ranks(2, |world| {
        let world = world.sharing_sequences(2).unwrap();
        world.sharing_matrices(2).unwrap_err().to_string()
    }) {
        assert!(message.contains("set one of them to 1"), "{message}");
    }
}

#[test]
fn a_message_of_another_length_or_type_is_an_error_that_names_both() {
    let begun = Instant::now();
    let errors = ranks(2, |world| {
        let world = world.in_stages(2).unwrap();
        let group = world.group(Dim::Pipeline);
        let sent = group.send(1, Flat::F32(vec![1.0; 3]));
        match world.rank() {
            0 => sent.and_then(|()| group.receive(1, 1, Element::F32).map(drop)),
            _ => group.receive(0, 4, Element::F64).map(drop),
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

/// Operation in which a rank waits for the others of its group: the sum of their numbers.
type Sum = fn(&World) -> Result<u64>;

/// Result of a rank.
type Expected = fn(usize) -> usize;

fn sum_of(values: Result<Flat>) -> Result<u64> {
    values.map(|values| match values {
        Flat::F64(values) => values.iter().sum::<f64>() as u64,
        other => panic!("numbers, not {other:?}"),
    })
}

fn blocks(world: &World) -> Result<u64> {
    let own = Tensor::<1>::from_floats([world.rank() as f32; 2], &Device::flex());
    let blocks = world.sequence_group().all_to_all_tensor(own)?;
    Ok(blocks.into_data().iter::<f64>().sum::<f64>() as u64)
}

#[test]
fn after_a_failure_all_ranks_know_of_it_and_groups_work_again() {
    let cases: [(Split, Sum, Expected); 6] = [
        // the critic's ranks are alone, or one group
        (|w, n| w.sharing_sequences(n)?.sharing_critic_sequences(1), blocks, |r| r / 2 * 4 + 1),
        (|w, n| w.sharing_sequences(n)?.sharing_critic_sequences(4), blocks, |r| r / 2 * 4 + 1),
        (World::sharing_matrices, |w| sum_of(w.group(Dim::Tensor).all_reduce(number(w))), |r| r / 2 * 4 + 1),
        (World::sharing_matrices, |w| sum_of(w.replicas().all_reduce(number(w))), |r| r % 2 * 2 + 2),
        (World::sampling_together, |w| sum_of(w.group(Dim::Sampling).all_reduce(number(w))), |r| r / 2 * 4 + 1),
        (
            World::in_stages,
            |w| {
                let other = 1 - w.pipeline_stage().unwrap().stage();
                w.group(Dim::Pipeline).send(other, number(w))?;
                sum_of(w.group(Dim::Pipeline).receive(other, 1, Element::F64))
            },
            |r| (r + 2) % 4,
        ),
    ];
    for (case, (split, sum, expected)) in cases.into_iter().enumerate() {
        for failing in 0..4 {
            let told = ranks(4, |world| {
                let world = split(world, 2).unwrap();
                let told = if world.rank() == failing {
                    world.agree_on_failure(Some(Failure::new("no room")))
                } else {
                    // an operation of the group is interrupted, or the one of all ranks
                    let done = sum(&world).and_then(|_| world.all_reduce(number(&world)));
                    world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
                };
                let members = world.of_critic().sequence_group().exchange(name(&world)).unwrap();
                assert_eq!(members.len(), world.of_critic().sequence_size());
                (told.unwrap_err().to_string(), sum(&world).unwrap())
            });
            for (rank, (told, sum)) in told.into_iter().enumerate() {
                assert_eq!(told, format!("rank {failing} failed: no room"), "case {case}");
                assert_eq!(sum, expected(rank) as u64, "case {case}, rank {rank}");
            }
        }
    }
}

#[test]
fn a_rank_that_waits_for_one_that_knows_of_a_failure_is_told_too() {
    let told = ranks(4, |world| {
        let world = world.sharing_matrices(2).unwrap();
        let told = match world.rank() {
            0 => world.agree_on_failure(Some(Failure::new("no room"))),
            // its group's sum is interrupted, and the others wait for it among its replicas
            1 => {
                let done = world.group(Dim::Tensor).all_reduce(number(&world));
                world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
            }
            _ => {
                let done = world.replicas().all_reduce(number(&world));
                world.agree_on_failure(done.err().map(|e| Failure::new(e.to_string())))
            }
        };
        told.unwrap_err().to_string()
    });
    assert!(told.iter().all(|told| told == "rank 0 failed: no room"));
}
