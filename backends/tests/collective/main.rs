//! Collectives against a serial reference, and what happens where ranks disagree or fail.

mod background;
mod failures;
mod links;

use firebrick_backends::collective::{
    Collective, Element, Flat, OperationKind, Result, Settings, Solo, Threads, shard,
};
use half::{bf16, f16};
use proptest::prelude::*;
use std::ops::Range;
use std::time::{Duration, Instant};

/// Small enough that a test's values take several messages.
pub fn small() -> Settings {
    Settings { deadline: Duration::from_secs(20), frame: 1 << 9 }
}

/// What every rank made of it.
pub fn ranks<T: Send>(size: usize, work: impl Fn(&dyn Collective) -> T + Sync) -> Vec<T> {
    let done = Threads::run(size, small(), |rank| work(rank.as_ref()));
    done.into_iter().map(|rank| rank.unwrap()).collect()
}

/// Numbers of a rank: of all magnitudes, so that another order of a sum is another sum.
fn number(seed: u64, rank: usize, at: usize) -> f64 {
    let mut bits = seed ^ (rank as u64) << 32 ^ at as u64;
    for _ in 0..3 {
        bits = (bits ^ bits >> 31).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    }
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    sign * (1.0 + (bits >> 12) as f64 / (1_u64 << 52) as f64) * f64::from((bits >> 1 & 31) as i32 - 16).exp2()
}

fn values(element: Element, seed: u64, rank: usize, len: usize) -> Flat {
    let numbers = (0..len).map(|at| number(seed, rank, at));
    match element {
        Element::Byte => Flat::Bytes(numbers.map(|v| v.to_bits() as u8).collect()),
        Element::F32 => Flat::F32(numbers.map(|v| v as f32).collect()),
        Element::F64 => Flat::F64(numbers.collect()),
        Element::Bf16 => Flat::Bf16(numbers.map(bf16::from_f64).collect()),
        Element::F16 => Flat::F16(numbers.map(f16::from_f64).collect()),
    }
}

/// The sum of all ranks' values, one after the other.
fn serial(element: Element, seed: u64, size: usize, len: usize) -> Flat {
    let of = |rank| values(element, seed, rank, len);
    let others = (1..size).map(of);
    match of(0) {
        Flat::F32(first) => Flat::F32(others.fold(first, |sum, next| match next {
            Flat::F32(next) => sum.iter().zip(next).map(|(a, b)| a + b).collect(),
            _ => unreachable!("one type"),
        })),
        Flat::F64(first) => Flat::F64(others.fold(first, |sum, next| match next {
            Flat::F64(next) => sum.iter().zip(next).map(|(a, b)| a + b).collect(),
            _ => unreachable!("one type"),
        })),
        Flat::Bf16(first) => {
            let wide = first.iter().map(|v| v.to_f32()).collect();
            let sum: Vec<f32> = others.fold(wide, |sum: Vec<f32>, next| match next {
                Flat::Bf16(next) => sum.iter().zip(next).map(|(a, b)| a + b.to_f32()).collect(),
                _ => unreachable!("one type"),
            });
            Flat::Bf16(sum.into_iter().map(bf16::from_f32).collect())
        }
        _ => unreachable!("bytes have no sum"),
    }
}

fn part(row: &Flat, values: Range<usize>) -> Flat {
    let lengths = [values.start, values.len(), row.len() - values.end];
    row.split(&lengths).nth(1).unwrap()
}

/// Parts of one type one behind the other.
fn concat(parts: impl IntoIterator<Item = Flat>) -> Vec<u8> {
    parts.into_iter().flat_map(|part| part.as_bytes().to_vec()).collect()
}

/// Every operation on values of one length, compared by bytes.
fn check_all(size: usize, element: Element, len: usize, seed: u64) {
    let input = |rank: usize| values(element, seed, rank, len);
    let blocks = |rank: usize| values(element, seed, rank, len * size);
    let results = ranks(size, |group| {
        let rank = group.rank();
        let sums = (element != Element::Byte)
            .then(|| (group.all_reduce(input(rank)).unwrap(), group.reduce_scatter(input(rank)).unwrap()));
        let gathered = group.all_gather(input(rank)).unwrap();
        let dealt = group.all_to_all(blocks(rank)).unwrap();
        let exchanged = group.exchange(input(rank).as_bytes()[..rank.min(len)].to_vec()).unwrap();
        // a ring
        group.send((rank + 1) % size, input(rank)).unwrap();
        let before = (rank + size - 1) % size;
        let passed = group.receive(before, len, element).unwrap();
        (sums, gathered, dealt, exchanged, passed)
    });
    for (rank, (sums, gathered, dealt, exchanged, passed)) in results.into_iter().enumerate() {
        if let Some((reduced, scattered)) = sums {
            let sum = serial(element, seed, size, len);
            assert_eq!(reduced.as_bytes(), sum.as_bytes());
            assert_eq!(scattered.as_bytes(), part(&sum, shard(len, size, rank)).as_bytes());
        }
        assert_eq!(gathered.as_bytes(), concat((0..size).map(input)));
        let block = |from| part(&blocks(from), rank * len..(rank + 1) * len);
        assert_eq!(dealt.as_bytes(), concat((0..size).map(block)));
        let bytes = |from: usize| input(from).as_bytes()[..from.min(len)].to_vec();
        assert_eq!(exchanged, (0..size).map(bytes).collect::<Vec<_>>());
        assert_eq!(passed.as_bytes(), input((rank + size - 1) % size).as_bytes());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]
    #[test]
    fn every_operation_equals_a_serial_one_in_the_order_of_the_ranks(
        size in 2_usize..5,
        element in prop::sample::select(vec![Element::F32, Element::F64, Element::Bf16, Element::Byte]),
        // a message has 512 bytes: none, part of one, several
        len in prop_oneof![Just(0_usize), 1_usize..9, 0_usize..1_500],
        seed in any::<u64>(),
    ) {
        check_all(size, element, len, seed);
    }
}

#[test]
fn one_rank_gets_back_what_it_gives() {
    let group = Solo;
    let input = Flat::F32(vec![1.0, 2.0]);
    assert_eq!(group.all_reduce(input.clone()).unwrap(), input);
    assert_eq!(group.reduce_scatter(input.clone()).unwrap(), input);
    assert_eq!(group.all_gather(input.clone()).unwrap(), input);
    assert_eq!(group.all_to_all(input.clone()).unwrap(), input);
    assert_eq!(group.exchange(vec![7]).unwrap(), [[7]]);
    assert!(group.send(1, input).unwrap_err().to_string().contains("no rank 1"));
}

#[test]
fn bytes_are_not_summed() {
    for message in ranks(2, |group| group.all_reduce(Flat::Bytes(vec![1])).unwrap_err().to_string()) {
        assert!(message.contains("bytes have no sum"), "{message}");
    }
}

#[test]
fn groups_of_a_split_are_ordered_by_key_and_do_not_disturb_each_other() {
    let results = ranks(4, |world| {
        // rows {0, 1} and {2, 3}; columns {0, 2} and {1, 3}, the higher rank first
        let row = world.split(world.rank() / 2, 0).unwrap();
        let column = world.split(world.rank() % 2, 4 - world.rank()).unwrap();
        let input = || Flat::F64(vec![world.rank() as f64]);
        let (a, b) = (row.all_gather(input()).unwrap(), column.all_gather(input()).unwrap());
        let nested = row.split(0, 0).unwrap().all_reduce(input()).unwrap();
        (a, b, nested, world.all_reduce(input()).unwrap())
    });
    let flat = |values: &[f64]| Flat::F64(values.to_vec());
    for (rank, (row, column, nested, sum)) in results.into_iter().enumerate() {
        let low = (rank / 2 * 2) as f64;
        assert_eq!(row, flat(&[low, low + 1.0]));
        assert_eq!(column, flat(&[(rank % 2 + 2) as f64, (rank % 2) as f64]));
        assert_eq!(nested, flat(&[2.0 * low + 1.0]));
        assert_eq!(sum, flat(&[6.0]));
    }
}

#[test]
fn what_is_sent_is_counted() {
    let counted = ranks(4, |group| {
        group.all_reduce(Flat::F32(vec![1.0; 1000])).unwrap();
        group.all_gather(Flat::F64(vec![1.0; 10])).unwrap();
        group.traffic()
    });
    for traffic in counted {
        assert_eq!(traffic.operations[OperationKind::AllReduce as usize], 1);
        // three shards of 250 values away, and the own sum to three ranks
        assert_eq!(traffic.bytes[OperationKind::AllReduce as usize], 2 * 3 * 1000);
        assert_eq!(traffic.bytes[OperationKind::AllGather as usize], 3 * 80);
    }
}

fn mismatched(work: impl Fn(&dyn Collective) -> Result<()> + Sync, words: &[&str]) {
    let started = Instant::now();
    for error in ranks(3, |group| work(group).unwrap_err()) {
        let message = error.to_string();
        for word in words {
            assert!(message.contains(word), "{word}: {message}");
        }
    }
    assert!(started.elapsed() < Duration::from_secs(1));
}

#[test]
fn another_operation_on_one_rank_is_an_error_that_names_both() {
    mismatched(
        |group| {
            let input = Flat::F32(vec![1.0; 5]);
            match group.rank() {
                1 => group.all_gather(input).map(drop),
                _ => group.all_reduce(input).map(drop),
            }
        },
        &["rank 0 is in all_reduce of 5 f32", "rank 1 in all_gather of 5 f32"],
    );
}

#[test]
fn another_length_on_one_rank_is_an_error_that_names_both() {
    mismatched(
        |group| {
            let len = if group.rank() == 2 { 6 } else { 5 };
            group.reduce_scatter(Flat::F32(vec![1.0; len])).map(drop)
        },
        &["rank 0 is in reduce_scatter of 5 f32", "rank 2 in reduce_scatter of 6 f32"],
    );
}

#[test]
fn another_type_on_one_rank_is_an_error_that_names_both() {
    mismatched(
        |group| {
            let element = if group.rank() == 2 { Element::F32 } else { Element::F64 };
            group.all_gather(Flat::zeros(element, 4)).map(drop)
        },
        &["all_gather of 4 f64", "rank 2 in all_gather of 4 f32"],
    );
}

#[test]
fn a_receive_of_what_is_not_sent_is_an_error_that_names_both() {
    mismatched(
        |group| match group.rank() {
            0 => group.receive(1, 3, Element::F32).map(drop),
            _ => group.all_reduce(Flat::F32(vec![1.0; 3])).map(drop),
        },
        &["rank 0 is in a send of 3 f32", "rank 1 in all_reduce of 3 f32"],
    );
}
