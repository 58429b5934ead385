//! Collectives over MPI against the same ones between threads: `tests/mpi/run` starts it under `mpirun`. Every rank
//! computes what all ranks should have, with [`Threads`], and compares its own to the bit. Arguments: nothing; `nccl`,
//! with which values go over NCCL, between CUDA devices of which each rank has one; `speed`, with which it prints how
//! long sums take (`tests/mpi/speed`), in messages of at most so many bytes where a number follows; `panic N`, `error
//! N` or `kill N`, with which rank N fails while the others wait for it; or `mismatch N`, with which rank N gathers
//! another length than the others, and all end with an error that names both.

#![allow(clippy::print_stdout, reason = "a program")]

use firebrick_backends::allocator::{CountingAllocator, keep_freed_memory};
use firebrick_backends::collective::{
    Collective, Element, Failure, Flat, Nccl, Result, Settings, Threads, launched_world,
};
use firebrick_backends::device::{Backend, DeviceSpec, open};
use firebrick_backends::profile::{machine, measure_links};
use half::{bf16, f16};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// As in the program: memory that was touched before is used again.
#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Lengths: none, fewer than ranks, odd ones, several messages of [`FRAME`] bytes.
const LENGTHS: [usize; 7] = [0, 1, 3, 64, 1_001, 16_384, 100_003];

/// More lengths, drawn once, with one type each.
const RANDOM_LENGTHS: usize = 1_000;
const MAX_LEN: u64 = 3_000;

const ELEMENTS: [Element; 5] = [Element::F32, Element::F64, Element::Bf16, Element::F16, Element::Byte];

const FRAME: usize = 1 << 16;

fn settings() -> Settings {
    Settings { deadline: Duration::from_mins(1), frame: FRAME }
}

fn values(element: Element, rank: usize, len: usize) -> Flat {
    let number = |at: usize| {
        let bits = (at as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15 ^ rank as u64);
        (bits >> 40) as f64 / 3.0 - 2e6
    };
    let numbers = (0..len).map(number);
    match element {
        Element::F32 => Flat::F32(numbers.map(|v| v as f32).collect()),
        Element::F64 => Flat::F64(numbers.collect()),
        Element::Bf16 => Flat::Bf16(numbers.map(bf16::from_f64).collect()),
        // within its range
        Element::F16 => Flat::F16(numbers.map(|v| f16::from_f64(v / 1e3)).collect()),
        Element::Byte => Flat::Bytes(numbers.map(|v| v.to_bits() as u8).collect()),
    }
}

/// What a rank has after every operation on values of one length.
fn operations(group: &dyn Collective, element: Element, len: usize) -> Result<Vec<Flat>> {
    let (rank, size) = (group.rank(), group.size());
    let input = || values(element, rank, len);
    let mut results = vec![
        group.all_gather(input())?,
        group.all_to_all(values(element, rank, len * size))?,
        Flat::Bytes(group.exchange(vec![rank as u8; rank * 7])?.concat()),
    ];
    if element != Element::Byte {
        results.push(group.all_reduce(input())?);
        results.push(group.reduce_scatter(input())?);
        let half = group.split(rank % 2, size - rank)?;
        results.push(half.all_reduce(input())?);
    }
    group.send((rank + 1) % size, input())?;
    results.push(group.receive((rank + size - 1) % size, len, element)?);
    Ok(results)
}

fn compare(world: &dyn Collective, random: usize) -> Result<usize> {
    let mut cases = 0;
    let chosen = ELEMENTS.into_iter().flat_map(|element| LENGTHS.map(|len| (element, len)));
    let random = (0..random).map(|case| {
        let bits = (case as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        (ELEMENTS[case % ELEMENTS.len()], (bits % MAX_LEN) as usize)
    });
    for (element, len) in chosen.chain(random) {
        let results = operations(world, element, len)?;
        let threads = Threads::run(world.size(), settings(), |rank| operations(rank.as_ref(), element, len));
        let expected = threads.into_iter().nth(world.rank());
        let same = matches!(&expected, Some(Ok(Ok(expected))) if *expected == results);
        if !same {
            let rank = world.rank();
            world.agree(Some(Failure::new(format!(
                "{element:?} of {len} values on rank {rank} is not what threads have"
            ))))?;
        }
        cases += results.len();
    }
    world.agree(None)?;
    Ok(cases)
}

/// Links inside a machine and between machines, where every rank's is one of its own: the same on all ranks.
fn links(world: &Arc<dyn Collective>) -> Result<()> {
    let apart = world.rank().to_le_bytes().to_vec();
    for (machine, has) in [(machine(), [true, false]), (apart, [false, true])] {
        let links = measure_links(world, &machine)?;
        let text = format!("{links:?}");
        let texts = world.exchange(text.clone().into_bytes())?;
        let alike = texts.iter().all(|other| other == text.as_bytes());
        if !alike || [links.inside.is_some(), links.between.is_some()] != has {
            let failure = format!("links of rank {}: {text}", world.rank());
            world.agree(Some(Failure::new(failure)))?;
        }
        world.agree(None)?;
        let measured = links.inside.or(links.between).filter(|_| world.rank() == 0);
        if let Some(link) = measured {
            println!("{} ranks send each other {link}", world.size());
        }
    }
    Ok(())
}

/// Milliseconds of sums of 64 MiB of f32 over all ranks, the slowest rank's, a line each.
fn speed(world: &dyn Collective) -> Result<()> {
    const VALUES: usize = 16 << 20;
    for _ in 0..15 {
        let input: Vec<f32> = (0..VALUES).map(|i| (i % 97) as f32 + world.rank() as f32).collect();
        world.agree(None)?;
        let start = Instant::now();
        let sum = world.all_reduce(Flat::F32(input))?;
        let took = start.elapsed().as_secs_f64();
        drop(sum);
        let times = world.exchange(took.to_le_bytes().to_vec())?;
        let times = times.iter().filter_map(|bytes| {
            let bytes = bytes.as_slice().try_into().ok()?;
            Some(f64::from_le_bytes(bytes))
        });
        let slowest = times.fold(0.0, f64::max);
        if world.rank() == 0 {
            println!("{:.3}", 1e3 * slowest);
        }
    }
    Ok(())
}

/// The same ranks over NCCL, on the CUDA device of each one's number.
fn over_nccl(world: &Arc<dyn Collective>) -> Arc<dyn Collective> {
    let spec = DeviceSpec::Named { backend: Backend::Cuda, index: world.rank() };
    let (device, _) = open(spec).unwrap_or_else(|error| panic!("{error}"));
    let joined = Nccl::join(world, &device).unwrap_or_else(|error| panic!("{error}"));
    joined.unwrap_or_else(|why| panic!("{why}"))
}

/// Sums as the trainer makes them, but for the length of messages where one is given.
fn time_sums(frame: Option<usize>) {
    keep_freed_memory();
    let trainer = Settings::default();
    let settings = Settings { frame: frame.unwrap_or(trainer.frame), ..trainer };
    let world = launched_world(settings).unwrap_or_else(|error| panic!("{error}"));
    speed(world.as_ref()).unwrap_or_else(|error| panic!("{error}"));
}

/// Gathers one value more than the others on one rank, and ends with what that is answered.
fn gather_unlike(world: &dyn Collective, rank: Option<usize>) -> ! {
    world.agree(None).unwrap_or_else(|error| panic!("{error}"));
    let start = Instant::now();
    let len = 10 + usize::from(rank == Some(world.rank()));
    let done = world.all_gather(Flat::zeros(Element::F32, len));
    let answer = match done {
        Ok(_) => "no error".to_owned(),
        Err(error) => error.to_string(),
    };
    let took = start.elapsed().as_millis();
    println!("rank {} was told within {took} ms: {answer}", world.rank());
    std::process::exit(4);
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = arguments.get(1).and_then(|text| text.parse::<usize>().ok());
    if arguments.first().is_some_and(|first| first == "speed") {
        time_sums(number);
        return;
    }
    let mut world = launched_world(settings()).unwrap_or_else(|error| panic!("{error}"));
    if arguments.first().is_some_and(|first| first == "nccl") {
        world = over_nccl(&world);
    }
    if arguments.first().is_some_and(|first| first == "mismatch") {
        gather_unlike(world.as_ref(), number);
    }
    if number == Some(world.rank()) {
        match arguments[0].as_str() {
            "panic" => panic!("on purpose, on rank {}", world.rank()),
            "error" => {
                world.abort("a file is missing");
                // sends the last words
                drop(world);
            }
            _ => std::process::abort(),
        }
        std::process::exit(3);
    }
    // stand-ins for cards are slow
    let random = if arguments.is_empty() { RANDOM_LENGTHS } else { 0 };
    match links(&world).and_then(|()| compare(world.as_ref(), random)) {
        Ok(cases) if world.rank() == 0 => {
            println!("{cases} results of {} ranks are those of threads", world.size());
        }
        Ok(_) => {}
        Err(error) => {
            println!("rank {}: {error}", world.rank());
            // without MPI_Finalize, which would wait for the rank that failed
            world.abort(&error.to_string());
            drop(world);
            std::process::exit(1);
        }
    }
}
