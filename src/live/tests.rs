mod observed;

use super::keys::{Action, press};
use super::metrics::{Unit, headlines, left};
use super::state::LiveState;
use super::steering::Steering;
use super::theme::Theme;
use super::{picture, view};
use firebrick::backends::memory::{Reading, ReadingSource};
use firebrick::engine::config::{Mode, parse};
use firebrick::engine::metrics::{LedgerEntry, Phase};
use firebrick::engine::plan::estimate::EstimatePhase;
use firebrick::report::{Excerpt, Pick, Planned, Scalars, ViewUpdate};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};
use ratatui::style::Color;
use std::path::Path;
use std::time::Duration;

const TINY: &str = "
model:
  arch: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
         max_position_embeddings: 32}
task: {kind: arithmetic, difficulty: 1, validation_size: 4}
output: run
device: cpu
rollout: {n: 4, prompt_length: 6, response_length: 4}
trainer: {steps: 3, train_batch_size: 4, seed: 5, save_freq: -1}
";

fn opened(mode: Mode, steps: u64) -> ViewUpdate {
    ViewUpdate::Opened { name: "arithmetic".into(), mode, task: parse(TINY, &[]).unwrap().task, steps: Some(steps) }
}

fn metrics(step: u64, values: &[(&str, f64)]) -> ViewUpdate {
    let values = values.iter();
    ViewUpdate::Metrics {
        step,
        steps: None,
        metrics: values.map(|(name, value)| ((*name).to_owned(), *value)).collect(),
    }
}

fn excerpt(completion: &str, reward: f64, finish: &str) -> Excerpt {
    Excerpt {
        step: 40,
        draw: 7,
        sample: 0,
        prompt: "07+35=".into(),
        completion: completion.into(),
        answer: "042".into(),
        reward: Some(reward),
        reward_parts: vec![("exact".into(), Some(reward))],
        readings: Vec::new(),
        advantage: Some(reward - 0.5),
        finish: finish.into(),
        tokens: 4,
    }
}

fn reading(phase: Phase, bytes: u64) -> LedgerEntry {
    LedgerEntry {
        step: 40,
        phase,
        reading: Reading {
            source: ReadingSource::CountedHeap,
            in_use_bytes: 0,
            reserved_bytes: 0,
            peak_bytes: Some(bytes),
        },
        peak_source: None,
        driver_free_bytes: None,
        driver_total_bytes: None,
        accounts: Vec::new(),
    }
}

/// A run of forty steps: the reward rises, truncation falls.
fn recorded() -> Vec<ViewUpdate> {
    let mib = |bytes: u64| bytes << 20;
    let mut news = vec![
        opened(Mode::Rl, 400),
        ViewUpdate::Planned(Planned {
            peak_bytes: mib(64),
            phases: [
                (EstimatePhase::Rollout, mib(48)),
                (EstimatePhase::Backward, mib(64)),
                (EstimatePhase::Optimizer, mib(40)),
            ]
            .into(),
            seconds: 0.5,
        }),
        ViewUpdate::Note("training 608,000 parameters on cpu".into()),
        metrics(0, &[("val-core/arithmetic/reward", 0.25)]),
    ];
    for step in 1..=40_u32 {
        let done = f64::from(step) / 40.0;
        news.push(metrics(
            step.into(),
            &[
                ("critic/score/mean", 0.25 + done / 2.0),
                ("response_length/clip_ratio", 0.5 - done / 2.0),
                ("frac_reward_zero_std", 0.125),
                ("actor/entropy", 1.5 - done),
                ("training/rollout_probs_diff_mean", 1.5e-5),
                ("timing_s/gen", 0.25),
                ("timing_s/reward", 0.0625),
                ("timing_s/adv", 0.003),
                ("timing_s/update_actor", 0.1875),
                ("timing_s/step", 0.5),
                ("perf/throughput", 12_345.0),
                ("perf/max_memory_allocated_gb", 60.0 / 1024.0),
            ],
        ));
        if step % 20 == 0 {
            let reward = 0.25 + done / 4.0;
            news.push(metrics(step.into(), &[("val-core/arithmetic/reward", reward)]));
        }
    }
    news.extend([
        ViewUpdate::Memory(vec![reading(Phase::Generate, mib(40)), reading(Phase::UpdateActor, mib(66))]),
        ViewUpdate::Samples {
            step: 40,
            samples: vec![
                (Pick::Newest, excerpt("43 ", 0.0, "stop")),
                (Pick::Best, excerpt("042", 1.0, "stop")),
                (Pick::Worst, excerpt("9999", 0.0, "length")),
            ],
        },
        ViewUpdate::Warning("memory grows: 12 KiB a step".into()),
        ViewUpdate::Phase { step: 41, phase: "gen" },
    ]);
    news
}

fn told(news: Vec<ViewUpdate>) -> LiveState {
    let mut state = LiveState::new(false);
    for one in news {
        state.apply(one);
    }
    state
}

fn running() -> LiveState {
    let mut state = told(recorded());
    state.clock = Duration::from_millis(400);
    state
}

/// Compares a picture with a file; `FIREBRICK_SCREENS=write` writes the file, to be looked at.
fn compare(state: &LiveState, name: &str, (columns, rows): (u16, u16)) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/live");
    let path = folder.join(format!("{name}-{columns}x{rows}.txt"));
    let drawn = picture(state, columns, rows).unwrap();
    if std::env::var_os("FIREBRICK_SCREENS").is_some_and(|value| value == "write") {
        std::fs::write(&path, &drawn).unwrap();
    }
    let wanted = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(drawn == wanted, "{} is not what is drawn:\n{drawn}", path.display());
}

#[test]
fn windows_of_three_sizes_show_a_run_as_recorded() {
    let state = running();
    compare(&state, "running", (80, 24));
    compare(&state, "running", (200, 60));
    compare(&state, "running", (40, 12));
}

#[test]
fn an_ended_run_the_help_and_a_supervised_run_are_shown_as_recorded() {
    let mut ended = running();
    ended.watching = true;
    ended.apply(ViewUpdate::Ended { steps: 40 });
    compare(&ended, "stopped", (80, 24));
    let mut help = running();
    help.help = true;
    compare(&help, "help", (80, 24));
    let mut supervised = told(vec![opened(Mode::Sft, 20), metrics(0, &[("val/loss", 2.5)])]);
    for step in 1..=10_u32 {
        let loss = 2.5 - f64::from(step) / 10.0;
        let values = [
            ("train/loss", loss),
            ("actor/grad_norm", 1.0),
            ("actor/lr", 1e-3),
            ("timing_s/update_actor", 0.1),
            ("timing_s/step", 0.1),
        ];
        supervised.apply(metrics(step.into(), &values));
    }
    compare(&supervised, "supervised", (80, 24));
}

#[test]
fn the_headline_is_reward_truncation_spread_entropy_and_mismatch_and_not_the_loss() {
    let headlines = headlines(&running().run);
    let labels: Vec<&str> = headlines.iter().map(|h| h.label).collect();
    let wanted = ["reward", "validation", "truncated", "no spread", "entropy", "mismatch"];
    assert_eq!(labels, wanted);
    assert_eq!(headlines[0].value, Some(0.75));
    // over ten of forty steps
    assert!((headlines[0].change.unwrap() - 0.125).abs() < 1e-12);
    assert_eq!((headlines[1].value, headlines[1].unit), (Some(0.5), Unit::Alone));
    assert_eq!(headlines[2].value, Some(0.0));
}

#[test]
fn the_rest_takes_as_long_as_the_last_steps_took() {
    let mut state = running();
    assert!((left(&state.run).unwrap() - 180.0).abs() < 1e-9);
    state.apply(ViewUpdate::Ended { steps: 40 });
    assert_eq!(left(&state.run), None);
}

#[test]
fn another_run_forgets_what_was_said_of_the_last() {
    let mut state = running();
    state.apply(opened(Mode::Rl, 7));
    let run = &state.run;
    assert_eq!((run.step, run.steps), (0, Some(7)));
    assert!(run.samples.is_empty() && run.notes.is_empty() && run.warnings == 0);
    assert!(run.scalars == Scalars::default());
}

/// The first line of a window of so many columns, of a run with a long name in its longest phase.
fn first_lines(columns: u16) -> Vec<String> {
    let mut state = running();
    state.run.name = "countdown-of-four-numbers-qwen3".into();
    state.apply(ViewUpdate::Phase { step: 41, phase: "update_actor" });
    let drawn = picture(&state, columns, 24).unwrap();
    drawn.lines().take(2).map(str::to_owned).collect()
}

#[test]
fn a_narrow_window_leaves_out_the_speed_shortens_the_name_and_cuts_no_word() {
    const DOING: &str = "update_actor for 0 ms";
    let wide =
        "countdown-of-four-numbers-qwen3  step 40 of 400   update_actor for 0 ms  12,345 tokens/s  3 min 0 s left";
    assert_eq!(first_lines(120)[0], wide);
    assert_eq!(
        first_lines(90)[0],
        "countdown-of-four-numbers-qwen3  step 40 of 400   update_actor for 0 ms  3 min 0 s left"
    );
    for columns in 60..=120 {
        let line = first_lines(columns).swap_remove(0);
        let (name, rest) = line.split_once("  ").unwrap();
        assert!(name == "countdown-of-four-numbers-qwen3" || name.contains('…'));
        let rest: Vec<&str> = rest.trim().split("  ").map(str::trim).collect();
        assert_eq!(rest[..2], ["step 40 of 400", DOING], "{columns}: {line}");
        let pace = &rest[2..];
        let expected = ["12,345 tokens/s", "3 min 0 s left"];
        assert!(expected.ends_with(pace), "{columns}: {line}");
        assert!(columns < 70 || !pace.is_empty(), "{columns}: {line}");
    }
    // a small window has a line for the name and one for what is done
    for (columns, name, doing) in [
        (40, "countdown-of…mbers-qwen3  step 40 of 400", "update_actor for 0 ms  3 min 0 s left"),
        (30, "countdo…-qwen3  step 40 of 400", DOING),
        (18, "step 40 of 400", DOING),
    ] {
        let lines = first_lines(columns);
        let shown = |text: &str| text.chars().take(columns.into()).collect::<String>();
        assert_eq!((&lines[0], &lines[1]), (&shown(name), &shown(doing)));
    }
}

#[test]
fn windows_of_every_size_are_drawn_with_much_with_little_and_with_nothing_to_show() {
    let mut help = running();
    help.help = true;
    let mut asking = running();
    asking.confirms_end = true;
    let mut long = running();
    let text = "漢字 and a long line of text\n".repeat(400);
    long.apply(ViewUpdate::Warning(text.clone()));
    long.apply(ViewUpdate::Samples { step: 41, samples: vec![(Pick::Newest, excerpt(&text, f64::NAN, "length"))] });
    let states = [running(), help, asking, long, LiveState::new(true), told(vec![opened(Mode::Sft, 3)])];
    let mut drawn = 0;
    for columns in (1..=30).chain([39, 40, 59, 60, 79, 80, 139, 140, 200, 300]) {
        for rows in (1..=25).chain([33, 34, 60, 100]) {
            for state in &states {
                let text = picture(state, columns, rows).unwrap();
                assert_eq!(text.lines().count(), usize::from(rows));
                drawn += 1;
            }
        }
    }
    assert!(drawn > 5000, "{drawn}");
}

/// The colours that a theme draws with.
fn colours(theme: Theme) -> usize {
    let mut terminal = Terminal::new(TestBackend::new(120, 40)).unwrap();
    let state = running();
    terminal.draw(|f| view::draw(f, &state, theme)).unwrap();
    let cells = terminal.backend().buffer().content();
    let coloured = cells.iter().filter(|c| c.fg != Color::Reset || c.bg != Color::Reset);
    coloured.count()
}

#[test]
fn without_colours_there_are_none_and_the_phases_can_still_be_told_apart() {
    assert_eq!(colours(Theme::PLAIN), 0);
    assert!(colours(Theme::COLOUR) > 100);
    let fills: std::collections::BTreeSet<char> = (0..8).map(|at| Theme::PLAIN.fill(at).0).collect();
    assert_eq!(fills.len(), 8);
}

#[test]
fn a_sample_cannot_write_to_the_terminal() {
    let mut state = running();
    let hostile = "\x1b[2J\x1b]0;title\x07\u{202e}right to left\r\nnext";
    state.apply(ViewUpdate::Samples { step: 41, samples: vec![(Pick::Newest, excerpt(hostile, 1.0, "stop"))] });
    state.apply(ViewUpdate::Warning(hostile.into()));
    for size in [(80, 24), (200, 60), (40, 12)] {
        let drawn = picture(&state, size.0, size.1).unwrap();
        let bad = drawn.chars().find(|&c| (c.is_control() && c != '\n') || c == '\u{202e}');
        assert_eq!(bad, None, "{drawn}");
    }
}

fn key(c: char) -> KeyEvent {
    KeyEvent::new(KeyCode::Char(c), KeyModifiers::NONE)
}

#[test]
fn a_second_q_asks_and_the_run_ends_only_if_the_answer_is_yes() {
    let (mut state, steering) = (running(), Steering::default());
    let mut type_in = |keys: &str| {
        let last = keys.chars().fold(None, |_, c| Some(press(key(c), &mut state, Some(&steering))));
        (last, state.confirms_end, steering.requests().stopping)
    };
    assert_eq!(type_in("q"), (Some(Action::None), false, true));
    assert_eq!(type_in("q"), (Some(Action::None), true, true));
    assert_eq!(type_in("x"), (Some(Action::None), false, true));
    assert_eq!(type_in("qc"), (Some(Action::None), false, false));
    assert_eq!(type_in("qqy"), (Some(Action::EndNow), false, true));
}

#[test]
fn keys_of_a_run_elsewhere_leave_the_view_and_steer_nothing() {
    let mut state = running();
    for c in "ps?".chars() {
        assert_eq!(press(key(c), &mut state, None), Action::None);
    }
    assert!(state.help && state.requests == super::steering::Requests::default());
    assert_eq!(press(key('q'), &mut state, None), Action::Leave);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(press(interrupt, &mut state, None), Action::Leave);
    assert_eq!(press(interrupt, &mut state, Some(&Steering::default())), Action::Interrupt);
}

#[test]
fn n_goes_through_the_samples_of_the_step_and_begins_again() {
    let mut state = running();
    let mut picks = vec![state.current().unwrap().pick];
    for _ in 0..3 {
        press(key('n'), &mut state, None);
        picks.push(state.current().unwrap().pick);
    }
    assert_eq!(picks, [Pick::Newest, Pick::Best, Pick::Worst, Pick::Newest]);
    // what the grader read, without the space that it does not compare
    let read = &state.run.samples[0].read;
    assert_eq!(read[..], [("answer".to_owned(), Some("43".to_owned()))]);
}
