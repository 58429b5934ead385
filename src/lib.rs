//! Reinforcement-learning post-training of language models, without Python.
//!
//! [`prelude`] has what most programs need. A run is a [`RunConfig`](prelude::RunConfig), built in code or read from a
//! file ([`engine::config::load`]), and a [`Trainer`](prelude::Trainer), which accepts a task, an objective and an
//! observer of your own. The crates below are re-exported: [`spec`] describes models and devices as plain data,
//! [`backends`] opens devices, [`plan`] plans memory, [`models`] has decoders and tokenizers, [`sampler`] samples, and [`engine`]
//! trains. The `firebrick` program is a command line for the same types.
//!
//! The examples below use a model of a few thousand random parameters on the CPU.
//!
//! # A task of your own
//!
//! A [`Task`](prelude::Task) gives prompts and says what completions are worth. This one asks for as many `=` as its
//! prompt says:
//!
//! ```
//! use firebrick::prelude::*;
//!
//! struct Count;
//!
//! impl Task for Count {
//!     fn name(&self) -> &str {
//!         "count"
//!     }
//!     fn alphabet(&self) -> Option<&str> {
//!         Some("12345*=") // one token each; a checkpoint has a tokenizer of its own
//!     }
//!     fn len(&self, split: Split) -> Option<u64> {
//!         (split == Split::Validation).then_some(5) // training prompts never end
//!     }
//!     fn example(&self, _: Split, index: u64) -> Result<Example, TaskError> {
//!         let count = index as usize % 5 + 1;
//!         Ok(Example::text(format!("{count}*"), "=".repeat(count)))
//!     }
//!     fn reward(&self, example: &Example, completion: &Completion) -> Result<Reward, TaskError> {
//!         let error = completion.text.len().abs_diff(example.answer.len());
//!         Ok(Reward::single("count", -(error as f64)))
//!     }
//! }
//!
//! # let runs = tempfile::tempdir()?;
//! # let output = runs.path().join("count");
//! let config = RunConfig::builder()
//!     .model_arch([
//!         ("model_type", "llama".into()), ("hidden_size", 32.into()), ("intermediate_size", 64.into()),
//!         ("num_hidden_layers", 1.into()), ("num_attention_heads", 2.into()),
//!     ])
//!     .output(output)
//!     .device(DeviceSpec::CPU)
//!     .rollout(RolloutConfig { prompt_length: 4, response_length: 8, ..RolloutConfig::default() })
//!     .trainer(TrainerConfig { steps: 3, train_batch_size: 2, ..TrainerConfig::default() })
//!     .build()?;
//! let summary = Trainer::builder(config).task(Count).build()?.run()?;
//! assert_eq!(summary.steps, 3);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # An objective of your own
//!
//! An [`Objective`](prelude::Objective) turns rewards into advantages of tokens, and its
//! [`TokenLoss`](prelude::TokenLoss) turns advantages and log-probs into a loss.
//! [`Trainer::step`](prelude::Trainer::step) runs one step and returns its facts.
//!
//! ```
//! use firebrick::prelude::*;
//!
//! /// REINFORCE with the mean reward of the step as its baseline.
//! struct Reinforce;
//!
//! impl TokenLoss for Reinforce {
//!     fn loss(&self, scores: &Scores, inputs: &TokenInputs) -> Loss {
//!         // one number per token; the weights make their sum the mean over the step's tokens
//!         let loss = scores.logp.clone().neg() * inputs.advantage() * inputs.weight();
//!         let metrics = vec![Metric::weighted_sum("actor/pg_loss", loss.clone())];
//!         Loss { total: loss.sum(), metrics }
//!     }
//! }
//!
//! impl Objective for Reinforce {
//!     fn compute_advantages(
//!         &self,
//!         rollouts: &mut [Rollout],
//!         _: &mut AdaptiveCoefficients,
//!     ) -> Vec<(String, f64)> {
//!         // a rollout to which no reward applies is not trained on, regardless of its columns
//!         let rewards: Vec<f64> = rollouts.iter().filter_map(|r| r.reward).collect();
//!         let mean = rewards.iter().sum::<f64>() / rewards.len().max(1) as f64;
//!         for rollout in rollouts {
//!             let tokens = rollout.completion.len();
//!             let reward = rollout.reward.unwrap_or(mean);
//!             rollout.mask = vec![true; tokens];
//!             rollout.columns.advantage = Some(vec![reward - mean; tokens]);
//!             rollout.penalized_reward = reward;
//!         }
//!         vec![("reinforce/baseline".into(), mean)]
//!     }
//! }
//!
//! # let runs = tempfile::tempdir()?;
//! # let output = runs.path().join("reinforce");
//! let mut config = RunConfig::builder()
//!     .model_arch([
//!         ("model_type", "llama".into()), ("hidden_size", 32.into()), ("intermediate_size", 64.into()),
//!         ("num_hidden_layers", 1.into()), ("num_attention_heads", 2.into()),
//!     ])
//!     .task(TaskConfig::Arithmetic(ArithmeticConfig::default()))
//!     .output(output)
//!     .device(DeviceSpec::CPU)
//!     .build()?;
//! (config.rollout.prompt_length, config.rollout.response_length) = (8, 4);
//! config.trainer.train_batch_size = 2;
//!
//! let mut trainer = Trainer::builder(config).objective(Reinforce).build()?;
//! let report = trainer.step()?;
//! let advantages = report.rollout.expect("a step of RL samples").advantages;
//! assert_eq!(advantages[0].0, "reinforce/baseline");
//! assert!(report.actor.expect("it updates the policy").losses.contains_key("actor/pg_loss"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # A training loop of your own
//!
//! A [`Learner`](prelude::Learner) is a model, its optimizer and a memory plan; an update runs forward, backward and
//! one `AdamW` step over [sequences](prelude::Sequence) in micro-batches of the plan's size. Supervised fine-tuning by
//! hand:
//!
//! ```
//! use firebrick::prelude::*;
//! use serde_json::json;
//!
//! let (device, _) = open_device(DeviceSpec::CPU)?;
//! let tokenizer = Tokenizer::characters("0123456789+=")?;
//! let config = json!({
//!     "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
//!     "num_attention_heads": 2, "vocab_size": tokenizer.vocab_size(),
//! });
//! let checkpoint = Checkpoint::create(config.as_object().unwrap().clone(), None, None)?;
//! let decoder = Decoder::random(checkpoint.arch().clone(), 1, &device);
//! let plan = MemoryConfig::default().plan(checkpoint.arch())?;
//! let mut learner = Learner::new(decoder, plan, OptimConfig::default(), Runtime::new(&device));
//!
//! let mut batch = Vec::new();
//! for (prompt, answer) in [("1+2=", "3"), ("4+5=", "9"), ("6+6=", "12")] {
//!     let encode = |text| tokenizer.encode(text, false); // no special tokens
//!     batch.push(Sequence::completion(&encode(prompt)?, &encode(answer)?));
//! }
//! let tokens: usize = batch.iter().map(|sequence| sequence.positions.len()).sum();
//! for sequence in &mut batch {
//!     // the loss is a weighted sum: these weights make it the mean over all answer tokens
//!     sequence.columns.weight = Some(vec![1.0 / tokens as f64; sequence.positions.len()]);
//! }
//!
//! let (temperature, lr) = (1.0, 1e-2);
//! let mut losses = Vec::new();
//! for _ in 0..10 {
//!     losses.push(learner.update(&batch, temperature, &Nll, lr)?.sums.loss);
//! }
//! assert!(losses[9] < 0.5 * losses[0], "{losses:?}");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![forbid(unsafe_code)]

pub mod prelude;

pub use burn;
pub use firebrick_backends as backends;
pub use firebrick_engine as engine;
pub use firebrick_engine::{Error, Result};
pub use firebrick_import as import;
pub use firebrick_models as models;
pub use firebrick_plan as plan;
pub use firebrick_report as report;
pub use firebrick_sampler as sampler;
pub use firebrick_spec as spec;
