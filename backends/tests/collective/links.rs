//! Links that ranks time (`firebrick devices --measure` under `mpirun`).

use super::small;
use firebrick_backends::collective::{Solo, Threads};
use firebrick_backends::profile::{machine, measure_links};
use firebrick_spec::{LinkKind, MeasuredLinks};
use std::sync::Arc;

/// What every rank measures, on machines of these names.
fn measured(machines: &[&str]) -> Vec<MeasuredLinks> {
    let settings = firebrick_backends::collective::Settings { frame: 1 << 22, ..small() };
    let ranks = Threads::run(machines.len(), settings, |world| {
        let input = machines[world.rank()].as_bytes();
        measure_links(&world, input).unwrap()
    });
    ranks.into_iter().map(|rank| rank.unwrap()).collect()
}

#[test]
fn ranks_time_links_inside_a_machine_and_between_machines_where_there_are_any() {
    for (machines, inside, between) in [
        (&["a", "a"][..], true, false),
        (&["a", "b"], false, true),
        (&["a", "b", "a", "b"], true, true),
        // a machine has one rank
        (&["a", "a", "b"], true, true),
    ] {
        let results = measured(machines);
        for links in &results {
            assert_eq!(links, &results[0], "{machines:?}: the same on every rank");
            assert_eq!(links.inside.is_some(), inside, "{machines:?}");
            assert_eq!(links.between.is_some(), between, "{machines:?}");
            for link in links.inside.iter().chain(&links.between) {
                assert_eq!(link.kind, LinkKind::Measured);
                // a thread hands over neither a byte a microsecond nor a terabyte a second, and no message in no time
                assert!((1_000_000..1_000_000_000_000).contains(&link.bandwidth));
                assert!((1..1_000_000_000).contains(&link.latency_ns));
            }
        }
    }
}

#[test]
fn a_rank_alone_has_no_links_and_a_machine_is_always_the_same() {
    let alone = measure_links(&(Arc::new(Solo) as Arc<_>), b"a").unwrap();
    assert_eq!(alone, MeasuredLinks::default());
    assert_eq!(machine(), machine());
    assert!(!machine().is_empty());
}
