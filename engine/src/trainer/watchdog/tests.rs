use super::*;

const SECOND: Duration = Duration::from_secs(1);
const GEN: Place = Place { step: 1, phase: "gen" };

/// Ticks of a second until a pause is too long: its length and limit in seconds.
fn ticks(pauses: &mut Pauses, place: Place, beats: u64, count: usize, awaits_rank: bool) -> Option<(u64, u64)> {
    let pause = (0..count).find_map(|_| pauses.tick(Some(place), beats, SECOND, || awaits_rank));
    pause.map(|pause| (pause.length.as_secs(), pause.limit.as_secs()))
}

#[test]
fn a_phase_without_a_beat_hangs_after_the_timeout_and_is_told_once() {
    let mut pauses = Pauses::new(10 * SECOND);
    assert_eq!(ticks(&mut pauses, GEN, 0, 11, false), Some((10, 10)));
    assert_eq!(ticks(&mut pauses, GEN, 0, 100, false), None);
}

#[test]
fn a_beat_or_another_phase_is_progress() {
    let mut pauses = Pauses::new(10 * SECOND);
    for beats in 0..20 {
        assert_eq!(ticks(&mut pauses, GEN, beats, 9, false), None);
    }
    assert_eq!(ticks(&mut pauses, Place { phase: "reward", ..GEN }, 19, 9, false), None);
    assert_eq!(ticks(&mut pauses, Place { step: 2, phase: "reward" }, 19, 9, false), None);
}

#[test]
fn the_longest_pause_of_a_phase_raises_its_limit_alone() {
    let mut pauses = Pauses::new(10 * SECOND);
    assert_eq!(ticks(&mut pauses, GEN, 0, 10, false), None);
    let reward = Place { phase: "reward", ..GEN };
    assert_eq!(ticks(&mut pauses, reward, 0, 11, false), Some((10, 10)));
    assert_eq!(ticks(&mut pauses, GEN, 1, 200, false), Some((90, 90)));
}

#[test]
fn the_watchdog_of_an_awaited_rank_comes_first() {
    let mut pauses = Pauses::new(12 * SECOND);
    assert_eq!(ticks(&mut pauses, GEN, 0, 100, true), Some((15, 15)));
}

#[test]
fn the_caller_of_a_trainer_may_take_its_time() {
    let mut pauses = Pauses::new(10 * SECOND);
    for _ in 0..100 {
        assert_eq!(pauses.tick(None, 0, SECOND, || false), None);
    }
    assert_eq!(ticks(&mut pauses, GEN, 0, 10, false), None);
}

#[test]
fn parts_of_a_run_are_left_in_their_order() {
    let config = RunConfig::default();
    let ranks: Arc<dyn Collective> = Arc::new(firebrick_backends::collective::Solo);
    let watchdog = Watchdog::start(&config, &ranks, None);
    let phase = || watchdog.watched.place().map(|place| place.phase);
    let outer = watchdog.enter(1, REPORT);
    let inner = watchdog.enter(1, "gen");
    assert_eq!(phase(), Some("gen"));
    drop(inner);
    assert_eq!(phase(), Some(REPORT));
    drop(outer);
    assert_eq!(phase(), None);
}
