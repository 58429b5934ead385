//! `firebrick eval`.

use super::load_config;
use crate::arguments::EvalArgs;
use crate::output;
use anyhow::Context;
use firebrick::engine::config::{LoraSettings, ModelConfig};
use firebrick::engine::metrics::{validation_reward, validation_unjudged};
use firebrick::engine::trainer::{EvaluatedSample, evaluate};
use std::fmt::Write as _;
use std::path::Path;

pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    let mut config = load_config(&args.config, &args.overrides, args.device)?;
    if let Some(model) = &args.model {
        config.model = ModelConfig {
            path: Some(model.clone()),
            chat_template: config.model.chat_template.take(),
            chat_template_kwargs: std::mem::take(&mut config.model.chat_template_kwargs),
            ..ModelConfig::default()
        };
    }
    if let Some(adapter) = &args.adapter {
        // the base of the adapters
        let base = config.base();
        config.model.lora = Some(LoraSettings { base, ..LoraSettings::from_folder(adapter.clone()) });
    }
    let result = evaluate(&config)?;
    if let Some(path) = &args.samples {
        write_samples(path, &result.samples)?;
    }
    let text = if args.json {
        serde_json::to_string_pretty(&result)?
    } else {
        let metric = validation_reward(&result.task);
        let reward = result.reward.map_or_else(|| "none".to_owned(), |reward| format!("{reward:.4}"));
        let mut text = format!("{metric} {reward} over {} prompts", result.prompts);
        let unjudged = result.metrics.get(&validation_unjudged(&result.task)).filter(|count| **count > 0.0);
        if let Some(count) = unjudged {
            write!(text, " ({count} completions without a reward)")?;
        }
        let others = result
            .metrics
            .iter()
            .filter(|(name, _)| name.starts_with("val-core/") && !name.ends_with("@1") && **name != metric);
        for (name, value) in others {
            write!(text, "\n{name} {value:.4}")?;
        }
        text
    };
    output::print(&(text + "\n"))
}

/// Writes the completions, one per line.
fn write_samples(path: &Path, samples: &[EvaluatedSample]) -> anyhow::Result<()> {
    let mut text = String::new();
    for sample in samples {
        text.push_str(&serde_json::to_string(sample)?);
        text.push('\n');
    }
    std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}
