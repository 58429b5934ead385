//! First and last rates of every schedule, and settings that it rejects. The digits are held to transformers' by the
//! parity test.

use super::*;

fn config(json: &str) -> LrSchedulerConfig {
    serde_json::from_str(json).expect("schedule configuration")
}

fn schedule(json: &str) -> LrSchedule {
    config(json).build(2e-4, 100).expect("builds")
}

fn refused(json: &str) -> String {
    config(json).build(2e-4, 100).expect_err("refused").to_string()
}

fn close(rate: f64, expected: f64) -> bool {
    (rate - expected).abs() < 1e-12
}

const FALLING: [&str; 5] = [
    r#"{"lr_scheduler_type": "linear", "warmup_steps": 10}"#,
    r#"{"lr_scheduler_type": "cosine", "warmup_steps": 10}"#,
    r#"{"lr_scheduler_type": "polynomial", "lr_end": 0, "warmup_steps": 10}"#,
    r#"{"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 0, "warmup_steps": 10}"#,
    r#"{"lr_scheduler_type": "warmup_stable_decay", "num_decay_steps": 50, "warmup_steps": 10}"#,
];

#[test]
fn warm_up_starts_at_zero_and_ends_at_the_full_rate() {
    for json in FALLING {
        let schedule = schedule(json);
        assert!(close(schedule.lr(0), 0.0), "{json}");
        assert!(close(schedule.lr(5), 1e-4), "{json}");
        assert!(close(schedule.lr(10), 2e-4), "{json}");
    }
}

#[test]
fn falling_schedules_never_rise_after_warm_up_and_reach_zero() {
    for json in FALLING {
        let schedule = schedule(json);
        assert!((10..100).all(|s| schedule.lr(s + 1) <= schedule.lr(s)), "{json}");
        assert!(close(schedule.lr(100), 0.0), "{json}");
    }
}

#[test]
fn the_default_is_the_constant_rate() {
    let schedule = LrSchedulerConfig::default().build(1e-6, 0).expect("builds");
    assert!([0, 1, 1_000_000].iter().all(|&step| close(schedule.factor(step), 1.0)));
}

#[test]
fn a_warm_up_ratio_is_a_share_of_all_steps_rounded_up() {
    let ratio = config(r#"{"lr_scheduler_type": "linear", "warmup_ratio": 0.1}"#);
    let steps = config(r#"{"lr_scheduler_type": "linear", "warmup_steps": 2}"#);
    assert_eq!(ratio.build(1.0, 15), steps.build(1.0, 15));
}

#[test]
fn a_least_rate_may_be_a_rate_or_a_share() {
    let rate = schedule(r#"{"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 2e-5}"#);
    let share = schedule(r#"{"lr_scheduler_type": "cosine_with_min_lr", "min_lr_rate": 0.1}"#);
    for step in 0..=100 {
        assert!(close(rate.lr(step), share.lr(step)));
    }
    assert!(close(rate.lr(100), 2e-5));
}

#[test]
fn the_curves_of_warmup_stable_decay_meet_their_ends() {
    for curve in ["linear", "cosine", "1-sqrt"] {
        let schedule = schedule(&format!(
            r#"{{"lr_scheduler_type": "warmup_stable_decay", "warmup_steps": 10,
                "num_decay_steps": 20, "warmup_type": "{curve}", "decay_type": "{curve}",
                "min_lr_ratio": 0.2}}"#
        ));
        for (step, factor) in [(0, 0.2), (10, 1.0), (79, 1.0), (80, 1.0), (100, 0.2), (200, 0.2)] {
            assert!(close(schedule.factor(step), factor), "{curve} at {step}");
        }
    }
}

#[test]
fn a_run_that_is_all_warm_up_divides_by_nothing() {
    for json in FALLING.iter().take(4) {
        let schedule = config(json).build(1.0, 10).expect("builds");
        assert!((0..30).all(|step| schedule.lr(step).is_finite()), "{json}");
    }
}

#[test]
fn an_option_that_the_type_would_ignore_is_refused() {
    assert_eq!(
        refused(r#"{"lr_scheduler_type": "linear", "min_lr": 1e-6}"#),
        "`min_lr`: requires lr_scheduler_type: cosine_with_min_lr; it is linear"
    );
    assert!(refused(r#"{"num_cycles": 2}"#).contains("requires lr_scheduler_type: cosine, cosine_with_restarts, "));
}

#[test]
fn settings_that_make_no_sense_say_what_was_expected() {
    for (json, expected) in [
        (r#"{"warmup_ratio": 1.5}"#, "`warmup_ratio`: must be at most 1, found 1.5"),
        (r#"{"warmup_ratio": 0.1, "warmup_steps": 3}"#, "`warmup_ratio`: expected at most one of"),
        (r#"{"lr_scheduler_type": "cosine_with_min_lr"}"#, "`min_lr`: `cosine_with_min_lr` needs"),
        (r#"{"lr_scheduler_type": "cosine_with_min_lr", "min_lr": 1}"#, "`min_lr`: expected a minimum"),
        (r#"{"lr_scheduler_type": "polynomial", "lr_end": 1}"#, "`lr_end`: expected a rate from 0"),
        (r#"{"lr_scheduler_type": "inverse_sqrt", "timescale": 0}"#, "`timescale`: must be at least 1, found 0"),
        (r#"{"lr_scheduler_type": "warmup_stable_decay"}"#, "`num_decay_steps`: "),
        (
            r#"{"lr_scheduler_type": "warmup_stable_decay", "num_decay_steps": 99, "warmup_steps": 2}"#,
            "`num_decay_steps`: 2 warm-up and 99 decay steps exceed the run's 100",
        ),
    ] {
        let error = refused(json);
        assert!(error.starts_with(expected), "{json}: {error}");
    }
    let error = LrSchedulerConfig::default().build(0.0, 1).expect_err("refused").to_string();
    assert_eq!(error, "`lr`: expected a learning rate above 0, found 0");
}

#[test]
fn a_name_is_what_serde_reads() {
    for json in FALLING {
        let kind = serde_json::to_string(&config(json).lr_scheduler_type).expect("a name");
        assert!(json.contains(&kind));
    }
    let error = serde_json::from_str::<LrSchedulerConfig>(r#"{"lr_scheduler_type": "cosin"}"#);
    assert!(error.expect_err("refused").to_string().contains("expected one of `constant`"));
}
