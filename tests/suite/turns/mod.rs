//! Rollouts over several turns: tokens are those that were sampled and those that the template writes, what was not
//! sampled is not learnt, and an environment that fails costs its own group at most.

mod calculator;
mod objects;
mod own_data;
mod python;
mod ranks;
mod templates;

use firebrick_engine::config::{RunConfig, parse};
use firebrick_engine::metrics::StepReport;
use firebrick_engine::rollout::Rollout;
use firebrick_engine::task::{
    Completion, Environment, EnvironmentError, Environments, Example, Observation, PromptText, Reward, Split, Task,
    TaskError, Turn,
};
use firebrick_engine::trainer::{Start, Trainer};
use firebrick_models::Tokenizer;
use firebrick_models::tokenizer::{ChatOptions, Message};
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A vocabulary of so few tokens that a random model ends its turns.
const ALPHABET: &str = "ab1!";
const WORDS: [&str; 3] = ["<user>", "<assistant>", "<tool>"];
const TEMPLATE: &str = "{%- for m in messages -%}{{ '<' + m.role + '>' + m.content }}\
    {%- if m.role == 'assistant' -%}{{ eos_token }}{%- endif -%}{%- endfor -%}\
    {%- if add_generation_prompt -%}{{ '<assistant>' }}{%- endif -%}";

const CONFIG: &str = "
model:
  arch: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2, num_attention_heads: 2,
         max_position_embeddings: 128}
output: run
device: cpu
rollout: {n: 4, prompt_length: 12, response_length: 48, multi_turn: {max_assistant_turns: 4}}
update: {old_log_probs: trainer}
optim: {lr: 1.0e-3}
trainer: {steps: 4, train_batch_size: 4, seed: 5, test_freq: 2, save_freq: 2}
";

/// When environments fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fails {
    Never,
    /// Some of all that are asked, so that every rollout gets through at its second try.
    Once(At),
    /// All of one row.
    Row(i64, At),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Reset,
    Step,
    Reward,
    Panic,
}

/// Conversations whose environment answers every turn with its number and how long it was.
struct Chat {
    fails: Fails,
    asked: Arc<AtomicUsize>,
    workers: usize,
    /// What `reset` adds to the prompt.
    says: Option<String>,
    /// Whether it says another thing each time.
    fickle: bool,
}

impl Chat {
    fn new(fails: Fails) -> Self {
        Self { fails, asked: Arc::default(), workers: 0, says: None, fickle: false }
    }
}

struct Answering {
    fails: Fails,
    asked: Arc<AtomicUsize>,
    says: Option<String>,
    row: i64,
    turns: usize,
    letters: usize,
}

impl Answering {
    fn may_fail(&mut self, at: At) -> Result<(), EnvironmentError> {
        let fails = match self.fails {
            Fails::Once(when) if when == at || when == At::Panic && at == At::Step => {
                [4, 40, 60].contains(&self.asked.fetch_add(1, Ordering::SeqCst))
            }
            Fails::Row(row, when) => row == self.row && when == at,
            Fails::Never | Fails::Once(_) => false,
        };
        assert!(!(fails && self.fails == Fails::Once(At::Panic)), "as told");
        if fails {
            return Err(EnvironmentError::new(format!("failed at {at:?}, as told")));
        }
        Ok(())
    }
}

impl Environment for Answering {
    fn reset(&mut self, example: &Example) -> Result<Option<String>, EnvironmentError> {
        self.row = example.fields["row"].as_i64().unwrap_or_default();
        self.may_fail(At::Reset)?;
        Ok(self.says.clone())
    }

    fn step(&mut self, turn: &Turn) -> Result<Observation, EnvironmentError> {
        self.turns += 1;
        self.letters += turn.text.matches('a').count();
        self.may_fail(At::Step)?;
        let mut said = Observation::default();
        if turn.text.len().is_multiple_of(5) {
            return Ok(said);
        }
        said.add(Ok("1".repeat(self.turns)));
        Ok(said)
    }

    fn reward(&mut self) -> Result<Option<f64>, EnvironmentError> {
        self.may_fail(At::Reward)?;
        Ok(Some(self.letters as f64))
    }
}

impl Environments for Chat {
    fn tools(&self) -> &Value {
        &Value::Null
    }

    fn make(&self, _: usize) -> Box<dyn Environment> {
        let time = self.asked.load(Ordering::SeqCst);
        if self.fickle {
            self.asked.fetch_add(1, Ordering::SeqCst);
        }
        Box::new(Answering {
            fails: self.fails,
            asked: Arc::clone(&self.asked),
            says: self.says.clone().map(|own| own + &"1".repeat(usize::from(self.fickle) * (time % 2))),
            row: 0,
            turns: 0,
            letters: 0,
        })
    }

    fn workers(&self) -> usize {
        self.workers
    }
}

impl Task for Chat {
    fn name(&self) -> &'static str {
        "chat"
    }

    fn len(&self, split: Split) -> Option<u64> {
        (split == Split::Validation).then_some(3)
    }

    fn alphabet(&self) -> Option<&str> {
        Some(ALPHABET)
    }

    fn tokens(&self) -> &[&str] {
        &WORDS
    }

    fn chat_template(&self) -> Option<&str> {
        Some(TEMPLATE)
    }

    fn environments(&self) -> Option<&dyn Environments> {
        Some(self)
    }

    fn example(&self, _: Split, index: u64) -> Result<Example, TaskError> {
        let words = ["ab", "ba!", "aa1", "b", "1!1"];
        let Value::Object(fields) = json!({"row": index % 5}) else { unreachable!("an object") };
        Ok(Example {
            prompt: PromptText::Chat(vec![Message::new("user", words[(index % 5) as usize])]),
            fields: fields.into(),
            ..Example::text("", "")
        })
    }

    fn reward(&self, _: &Example, completion: &Completion<'_>) -> Result<Reward, TaskError> {
        let last = completion.text.matches('b').count() as f64;
        Ok(Reward::single("last", last))
    }
}

fn config(folder: &Path, more: &[&str]) -> RunConfig {
    let more: Vec<String> = more.iter().map(|own| (*own).to_owned()).collect();
    let mut config = parse(CONFIG, &more).expect("a configuration");
    folder.clone_into(&mut config.output);
    config
}

/// The steps of a run.
fn steps(folder: &Path, task: Chat, more: &[&str]) -> Vec<StepReport> {
    let builder = Trainer::builder(config(folder, more)).task(task);
    let mut trainer = builder.build().expect("a trainer");
    let mut reports = Vec::new();
    while trainer.finished_steps() < trainer.steps() {
        reports.push(trainer.step().expect("a step"));
    }
    trainer.finish().expect("a summary");
    reports
}

fn rollouts(reports: &[StepReport]) -> impl Iterator<Item = &Rollout> {
    reports.iter().flat_map(|report| &report.rollout.as_ref().expect("sampled").rollouts)
}

fn metrics(folder: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(folder.join("metrics.jsonl")).expect("metrics");
    let lines = text.lines();
    lines.map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn samples(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("samples.jsonl")).expect("samples")
}

fn tokenizer() -> Tokenizer {
    let own = Tokenizer::characters_and_words(ALPHABET, &WORDS).expect("a tokenizer");
    own.with_chat_template(TEMPLATE, Path::new("test")).expect("a template")
}

/// What a rollout has to be, whatever its environment does.
fn check(tokenizer: &Tokenizer, prompt: &[Message], rollout: &Rollout) {
    let whole = [prompt, &rollout.turns].concat();
    let text = tokenizer.render_chat_with(&whole, ChatOptions::default()).expect("rendered");
    let written = tokenizer.encode(&text, false).expect("encoded");
    let tokens = [rollout.prompt.as_slice(), &rollout.completion].concat();
    // a turn that was cut has no end
    let ended = tokens.len() == written.len();
    assert!(written.starts_with(&tokens) && (ended || written.len() == tokens.len() + 1));
    let sampled = rollout.sampled();
    assert!(sampled[sampled.len() - 1], "it ends with a turn of the model");
    let turns = rollout.turns.iter().filter(|m| m.role() == "assistant").count();
    assert_eq!(turns, rollout.num_turns());
    assert!(rollout.completion.len() <= 48 && turns <= 4);
    for (at, sampled) in sampled.iter().enumerate() {
        assert!(*sampled || !rollout.mask[at], "what was not sampled is learnt");
    }
    // the trainer's log-probs of a plain forward are the sampler's, turn by turn over its cache
    let (old, drawn) = (rollout.old_logp(), rollout.columns.full_logp.as_ref().expect("drawn"));
    for at in (0..sampled.len()).filter(|at| sampled[*at]) {
        assert!((old[at] - drawn[at]).abs() < 1e-4, "{} and {}", old[at], drawn[at]);
    }
}

#[test]
fn tokens_are_those_that_were_sampled_and_those_that_the_template_writes() {
    let folder = tempfile::tempdir().expect("a folder");
    let reports = steps(&folder.path().join("run"), Chat::new(Fails::Never), &[]);
    let (tokenizer, mut turns) = (tokenizer(), Vec::new());
    for report in &reports {
        let step = report.rollout.as_ref().expect("sampled");
        for rollout in &step.rollouts {
            let prompt = &step.prompts[(rollout.prompt_index - step.first_prompt) as usize];
            let PromptText::Chat(messages) = &prompt.example.prompt else { panic!("a conversation") };
            check(&tokenizer, messages, rollout);
            assert!(rollout.mask.iter().filter(|kept| **kept).count() > 0);
            let parts: Vec<&str> = rollout.reward_parts.iter().map(|(n, _)| n.as_str()).collect();
            assert_eq!(parts, ["last", "environment"]);
            turns.push(rollout.num_turns());
        }
    }
    assert!(turns.contains(&1) && turns.contains(&4), "{turns:?}");
    let lines = metrics(&folder.path().join("run"));
    for line in &lines[1..] {
        assert_eq!(line["environment/template_mismatch"], 0.0);
        assert_eq!(line["environment/lost"], 0.0);
        assert!(line["num_turns/max"].as_f64().expect("turns") > 1.0);
        assert!(line["training/rollout_probs_diff_max"].as_f64().expect("a difference") < 1e-4);
        assert!(line["reward/environment/mean"].is_number());
    }
    let text = samples(&folder.path().join("run"));
    let first: Value = serde_json::from_str(text.lines().next().expect("a line")).expect("JSON");
    assert!(first["num_turns"].is_number() && first["turns"][0]["role"] == "assistant");
}

#[test]
fn rewards_read_the_last_turn_before_the_stop_string_that_ended_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let reports = steps(&folder.path().join("run"), Chat::new(Fails::Never), &["rollout.stop=['1']"]);
    let (mut stopped, mut earlier) = (0, 0);
    for rollout in rollouts(&reports) {
        let mut own = rollout.turns.iter().rev().filter(|turn| turn.role() == "assistant");
        // a special token that was sampled is in the turn, and not in the text
        let last = own.next().expect("a turn").text().replace("<pad>", "");
        assert!(!last.contains('1'), "{last:?}");
        assert_eq!(rollout.reward_parts[0], ("last".to_owned(), last.matches('b').count() as f64));
        assert!(rollout.text.ends_with(last.as_str()), "{:?} and {last:?}", rollout.text);
        // the tokens are as they were sampled
        let decoded = tokenizer().decode(&rollout.completion, true).expect("a text");
        stopped += usize::from(decoded.len() == rollout.text.len() + 1 && decoded.ends_with('1'));
        earlier += own.filter(|turn| turn.text().ends_with('1')).count();
    }
    assert!(stopped > 0 && earlier > 0, "{stopped}, {earlier}");
}

/// What a run leaves that does not depend on the time.
fn left(folder: &Path) -> (String, Vec<u8>) {
    let weights = folder.join("checkpoints/step-000004/model/model.safetensors");
    (samples(folder), std::fs::read(weights).expect("weights"))
}

#[test]
fn environments_that_fail_once_or_answer_late_change_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    steps(&path("run"), Chat::new(Fails::Never), &[]);
    let whole = left(&path("run"));
    for at in [At::Reset, At::Step, At::Reward] {
        let name = format!("{at:?}");
        steps(&path(&name), Chat::new(Fails::Once(at)), &[]);
        let retries = |line: &Value| line["environment/retries"].as_f64().unwrap_or(0.0);
        let lines = metrics(&path(&name));
        assert!(lines.iter().map(retries).sum::<f64>() > 0.0, "{name}");
        assert!(lines[1..].iter().all(|line| line["environment/lost"] == 0.0), "{name}");
        assert!(left(&path(&name)) == whole, "{name}");
    }
    let threads = Chat { workers: 3, ..Chat::new(Fails::Never) };
    steps(&path("threads"), threads, &[]);
    let (text, _) = left(&path("threads"));
    assert!(text == whole.0, "samples of environments in threads");
}

#[test]
fn an_environment_that_panics_ends_the_run_with_its_words_and_the_row() {
    let folder = tempfile::tempdir().expect("a folder");
    for workers in [0, 2] {
        let path = folder.path().join(workers.to_string());
        let chat = Chat { workers, ..Chat::new(Fails::Once(At::Panic)) };
        let ran = Trainer::builder(config(&path, &[])).task(chat).build().expect("a trainer").run();
        let message = ran.map(drop).expect_err("an end").to_string();
        for part in ["environment failed at step ", " row ", "it panicked: as told"] {
            assert!(message.contains(part), "{part:?} is not in {message}");
        }
    }
}

#[test]
fn a_group_whose_environment_fails_for_good_is_left_out_and_counted() {
    for at in [At::Reset, At::Step, At::Reward] {
        let folder = tempfile::tempdir().expect("a folder");
        let reports = steps(&folder.path().join("run"), Chat::new(Fails::Row(2, at)), &[]);
        let mut left_out = 0;
        for report in &reports {
            let step = report.rollout.as_ref().expect("sampled");
            let of_row = |rollout: &Rollout| {
                let prompt = &step.prompts[(rollout.prompt_index - step.first_prompt) as usize];
                prompt.example.fields["row"] == 2
            };
            assert!(!step.rollouts.iter().any(of_row), "{at:?}: trained on");
            assert_eq!(step.rollouts.len() % 4, 0, "{at:?}: a group in part");
            assert!(step.left_out.iter().all(of_row));
            let lost = step.left_out.iter().filter_map(|r| r.reward_error.as_ref());
            assert!(lost.clone().all(|reason| reason.contains("as told")), "{at:?}");
            assert_eq!(step.stats.left_out_groups * 4, step.left_out.len());
            left_out += step.stats.left_out_groups;
        }
        assert!(left_out > 0, "{at:?}");
    }
}

#[test]
fn a_resumed_run_repeats_the_turns_of_one_that_was_not_stopped() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name);
    steps(&path("whole"), Chat::new(Fails::Never), &[]);
    let run = || Trainer::builder(config(&path("run"), &[])).task(Chat::new(Fails::Never));
    let mut first = run().build().expect("a trainer");
    for _ in 0..3 {
        first.step().expect("a step");
    }
    drop(first);
    // continues from the checkpoint of step 2
    run().start(Start::Resume).build().expect("resumed").run().expect("the rest");
    assert!(left(&path("run")) == left(&path("whole")));
}

#[test]
fn rollouts_whose_environments_begin_otherwise_than_their_group_are_sampled_from_their_own_prompts() {
    let folder = tempfile::tempdir().expect("a folder");
    let fickle = Chat { says: Some("!".into()), fickle: true, ..Chat::new(Fails::Never) };
    let more = ["rollout.val_kwargs.n=2", "rollout.val_kwargs.temperature=1.0"];
    let reports = steps(&folder.path().join("run"), fickle, &more);
    let tokenizer = tokenizer();
    let mut others = 0;
    for rollout in rollouts(&reports) {
        let text = tokenizer.decode(&rollout.prompt, false).expect("text");
        let content = text.strip_prefix("<user>").and_then(|own| own.strip_suffix("<assistant>")).expect("a prompt");
        assert!(content.ends_with(if rollout.sample % 2 == 0 { "!" } else { "!1" }), "{text}");
        check(&tokenizer, &[Message::new("user", content)], rollout);
        assert!(rollout.prompt_text.as_ref().is_none_or(|own| *own == text), "{text}");
        others += usize::from(rollout.prompt_text.is_some());
    }
    // every second one of all groups
    assert_eq!(others * 2, rollouts(&reports).count());
}

#[test]
fn what_an_environment_says_first_is_in_the_prompt_and_the_same_for_a_group() {
    let folder = tempfile::tempdir().expect("a folder");
    let says = Chat { says: Some("!!".into()), ..Chat::new(Fails::Never) };
    let reports = steps(&folder.path().join("run"), says, &[]);
    let tokenizer = tokenizer();
    for rollout in rollouts(&reports) {
        let text = tokenizer.decode(&rollout.prompt, false).expect("text");
        assert!(text.ends_with("!!<assistant>"), "{text}");
    }
    let long = Chat { says: Some("!".repeat(40)), ..Chat::new(Fails::Never) };
    let builder = Trainer::builder(config(&folder.path().join("long"), &["trainer.test_freq=0"]));
    let mut trainer = builder.task(long).build().expect("a trainer");
    let message = trainer.step().map(|_| ()).expect_err("no prompt fits").to_string();
    assert!(message.contains("rollout.prompt_length is 12"), "{message}");
}

#[test]
fn settings_that_environments_do_not_go_with_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    for (setting, part) in
        [("objective=remax", "has no environment"), ("rollout.multi_turn.max_assistant_turns=0", "must be at least 1")]
    {
        let more = vec![setting.to_owned()];
        let refused = parse(CONFIG, &more).map(|mut config| {
            config.output = folder.path().join("run");
            let builder = Trainer::builder(config).task(Chat::new(Fails::Never));
            builder.build().map(|_| ()).expect_err(setting).to_string()
        });
        let message = refused.unwrap_or_else(|error| error.to_string());
        assert!(message.contains(part), "{message}");
    }
}
