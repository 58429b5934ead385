//! Every operation over NCCL: the bits that ranks without it give; of tensors those of their values, and no copy of
//! them on the host.

use super::{RECORD, card, in_part, is, over_nccl, settings};
use crate::support::checked;
use burn::tensor::{DType, Device, Tensor, TensorData};
use firebrick_backends::accounts::Home;
use firebrick_backends::collective::{
    Collective, Element, Flat, Nccl, NcclInstallation, OperationKind, Threads, Traffic,
};
use firebrick_backends::transfer::HostTensor;
use half::{bf16, f16};

/// A number of a row, by splitmix64.
fn bits(seed: u64, at: usize) -> u64 {
    let mut x = (seed << 32 | at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A rank's values: of sizes whose sums are rounded.
pub(super) fn values(element: Element, rank: usize, len: usize) -> Flat {
    let number = |at: usize| (bits(rank as u64 + 1, at) >> 40) as f64 / 3e5 - 25.0;
    let all = (0..len).map(number);
    match element {
        Element::Byte => Flat::Bytes((0..len).map(|at| bits(rank as u64, at) as u8).collect()),
        Element::F32 => Flat::F32(all.map(|v| v as f32).collect()),
        Element::F64 => Flat::F64(all.collect()),
        Element::Bf16 => Flat::Bf16(all.map(bf16::from_f64).collect()),
        Element::F16 => Flat::F16(all.map(f16::from_f64).collect()),
    }
}

const ELEMENTS: [Element; 5] = [Element::F32, Element::Bf16, Element::F16, Element::F64, Element::Byte];

/// What a rank has after every operation on rows of a length, and what it sent.
fn operations(group: &dyn Collective, element: Element, len: usize) -> (Vec<Flat>, Traffic) {
    let (rank, size) = (group.rank(), group.size());
    let own = || values(element, rank, len);
    let mut found = vec![
        group.all_gather(own()).expect("gathered"),
        group.all_to_all(values(element, rank, len * size)).expect("exchanged"),
    ];
    if element != Element::Byte {
        found.push(group.all_reduce(own()).expect("summed"));
        found.push(group.reduce_scatter(own()).expect("summed"));
    }
    if size > 1 {
        group.send((rank + 1) % size, own()).expect("sent");
        let from = (rank + size - 1) % size;
        found.push(group.receive(from, len, element).expect("received"));
    }
    (found, group.traffic())
}

/// Twenty lengths between nothing and 20,000, the same in every run, and the smallest.
fn lengths() -> impl Iterator<Item = usize> {
    let random = (0..20).map(|case| (bits(77, case) % 20_000) as usize);
    [0, 1, 2, 3].into_iter().chain(random)
}

pub(super) fn at_twenty_lengths_nccl_gives_the_bits_that_threads_give(_: &str) {
    let all = |group: &dyn Collective| -> Vec<_> {
        let cases = lengths().flat_map(|len| ELEMENTS.map(|element| (len, element)));
        let mut found: Vec<_> = cases.map(|(len, element)| operations(group, element, len)).collect();
        // both of a group by themselves, and in the other order
        let swapped = group.split(0, group.size() - group.rank()).expect("a group");
        found.push(operations(swapped.as_ref(), Element::F32, 1_001));
        let single = group.split(group.rank(), 0).expect("a group of one");
        let own = values(Element::F32, group.rank(), 9);
        assert_eq!(single.all_reduce(own.clone()).expect("one"), own);
        let own = single.all_gather(own).expect("one");
        found.push((vec![own], group.traffic()));
        found
    };
    let found = over_nccl(2, settings(), all);
    let expected = Threads::run(2, settings(), |rank| all(rank.as_ref()));
    let mut cases = 0;
    for (rank, (found, expected)) in found.into_iter().zip(expected).enumerate() {
        for (case, (found, expected)) in found.into_iter().zip(expected.expect("ranks")).enumerate() {
            assert!(found.0 == expected.0, "rank {rank}, case {case}");
            // joining a group takes an exchange of its id
            let sent = |traffic: Traffic| {
                let kinds = OperationKind::ALL.iter().filter(|kind| **kind != OperationKind::Exchange);
                kinds.map(|&kind| (traffic.operations[kind as usize], traffic.bytes[kind as usize])).collect::<Vec<_>>()
            };
            assert_eq!(sent(found.1), sent(expected.1), "rank {rank}, case {case}");
            cases += found.0.len();
        }
    }
    checked("results over NCCL", cases);
}

/// What one card can show of NCCL: a communicator of one rank, and every operation on it. Another GPU beside it has not
/// been had.
pub(super) fn one_rank_alone_gets_from_nccl_what_it_gets_without() {
    let all = |group: &dyn Collective| -> Vec<_> {
        let cases = lengths().flat_map(|len| ELEMENTS.map(|element| (len, element)));
        cases.map(|(len, element)| operations(group, element, len).0).collect()
    };
    let found = over_nccl(1, settings(), all);
    let expected = Threads::run(1, settings(), |rank| all(rank.as_ref()));
    let expected: Vec<_> = expected.into_iter().map(|rank| rank.unwrap_or_else(|panic| panic!("{panic}"))).collect();
    assert!(found == expected, "values of one rank over NCCL");
    let NcclInstallation { path, version } = Nccl::installation().expect("it was used");
    let library = path.map_or_else(|| "libnccl".into(), |path| path.display().to_string());
    checked(&format!("results over NCCL {version}, {library}"), found.iter().flatten().map(Vec::len).sum());
}

/// A rank's values as a tensor on its card: every second column of a matrix, which do not lie one behind the other.
fn tensor(element: Element, rank: usize, len: usize, device: &Device) -> Tensor<1> {
    let (dtype, data) = match values(element, rank, len) {
        Flat::F64(values) => (DType::F64, TensorData::new(values, [len, 1])),
        Flat::Bf16(values) => (DType::BF16, TensorData::new(values, [len, 1])),
        Flat::F16(values) => (DType::F16, TensorData::new(values, [len, 1])),
        Flat::F32(values) => (DType::F32, TensorData::new(values, [len, 1])),
        Flat::Bytes(_) => unreachable!("tensors are of floats"),
    };
    let own = Tensor::<2>::from_data(data, (device, dtype));
    let besides = Tensor::ones([len, 1], (device, dtype));
    let both = Tensor::cat(vec![own, besides], 1);
    both.swap_dims(0, 1).narrow(0, 0, 1).reshape([len])
}

fn as_values(tensor: Tensor<1>) -> Flat {
    let [len] = tensor.dims();
    let host = HostTensor::download(tensor.reshape([1, len])).expect("values");
    Flat::as_stored(host)
}

pub(super) fn tensors_give_the_bits_of_their_values_and_keep_their_own(_: &str) {
    const ELEMENTS: [Element; 4] = [Element::F32, Element::F64, Element::Bf16, Element::F16];
    let found = over_nccl(2, settings(), |group| {
        let device = card(group.rank());
        assert_eq!(group.buffers_home(), Home::Device);
        let mut cases = 0;
        for (len, element) in lengths().flat_map(|len| ELEMENTS.map(|element| (len, element))) {
            if len == 0 {
                continue;
            }
            let of = |len| values(element, group.rank(), len);
            let own = tensor(element, group.rank(), len, &device);
            let pairs = [
                (group.all_gather_tensor(own.clone()), group.all_gather(of(len))),
                (group.all_reduce_tensor(own.clone()), group.all_reduce(of(len))),
                (group.reduce_scatter_tensor(own.clone()), group.reduce_scatter(of(len))),
                (
                    group.all_to_all_tensor(tensor(element, group.rank(), 2 * len, &device)),
                    group.all_to_all(of(2 * len)),
                ),
            ];
            for (kind, (tensor, flat)) in pairs.into_iter().enumerate() {
                let flat = flat.expect("values");
                if flat.is_empty() {
                    continue;
                }
                let tensor = as_values(tensor.expect("a tensor"));
                assert!(tensor == flat, "{kind} of {len} {element:?}");
                cases += 1;
            }
            assert!(as_values(own) == of(len), "what was given, {len} {element:?}");
        }
        let bytes = Tensor::<1>::zeros([0], (&device, DType::F32));
        assert_eq!(group.all_gather_tensor(bytes).expect("nothing").dims(), [0]);
        cases
    });
    // a rank whose shard is empty has nothing to compare
    assert!(found.iter().all(|&cases| cases > 300), "{found:?}");
    checked("operations on tensors", found.iter().sum());
}

pub(super) fn values_of_tensors_are_never_copied_to_the_host(test: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let record = folder.path().join("record");
    if !is("recorded") {
        let path = record.to_str().expect("a path");
        in_part(test, "recorded", &[(RECORD, path)]);
        return;
    }
    let path = std::env::var(RECORD).expect("a record");
    let lines = || std::fs::read_to_string(&path).expect("a record");
    let both = std::sync::Barrier::new(2);
    let counts = over_nccl(2, settings(), |group| {
        let device = card(group.rank());
        let len = 1 << 20;
        let own = Tensor::<1>::ones([len], (&device, DType::F32)).mul_scalar(1.5);
        let operations = |own: &Tensor<1>| {
            let sum = group.all_reduce_tensor(own.clone()).expect("a sum");
            let shard = group.reduce_scatter_tensor(sum).expect("a shard");
            let whole = group.all_gather_tensor(shard).expect("all shards");
            group.all_to_all_tensor(whole).expect("blocks")
        };
        let _ = operations(&own);
        device.sync().expect("computed");
        both.wait();
        let before = lines().lines().count();
        both.wait();
        let last = operations(&own);
        device.sync().expect("computed");
        both.wait();
        let after = lines();
        both.wait();
        // values of the host are copied, and the record says so
        group.all_reduce(Flat::F32(vec![1.0; len])).expect("a sum");
        both.wait();
        let of_host: Vec<String> = lines().lines().skip(after.lines().count()).map(str::to_owned).collect();
        both.wait();
        // four operations later every value is 1.5 + 1.5, twice
        let found = as_values(last.narrow(0, len - 1, 1));
        assert_eq!(found, Flat::F32(vec![6.0]));
        let copied = |line: &str| {
            let mut words = line.split(' ');
            let host = matches!(words.next(), Some("up" | "down"));
            let bytes = words.next().and_then(|word| word.parse::<u64>().ok());
            host && bytes.is_some_and(|bytes| bytes >= 1 << 10)
        };
        let new: Vec<&str> = after.lines().skip(before).collect();
        let collectives = new.iter().filter(|line| line.starts_with("collective")).count();
        assert_eq!(new.iter().filter(|line| copied(line)).count(), 0, "{new:?}");
        assert!(of_host.iter().any(|line| copied(line)), "{of_host:?}");
        collectives
    });
    // of two ranks: a sum is two operations of NCCL's
    assert_eq!(counts, [10, 10]);
    checked("operations without a copy", 4);
}
