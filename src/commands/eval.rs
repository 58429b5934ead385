//! `firebrick eval`.

use crate::arguments::EvalArgs;
use crate::output;
use firebrick::engine::config;
use firebrick::engine::config::LoraSettings;
use firebrick::engine::trainer::evaluate;

pub fn run(args: &EvalArgs) -> anyhow::Result<()> {
    let mut config = config::load(&args.config, &args.overrides)?;
    if let Some(device) = args.device {
        config.device = device;
    }
    if let Some(model) = &args.model {
        config.model = config::ModelConfig {
            path: Some(model.clone()),
            ..config::ModelConfig::default()
        };
    }
    if let Some(adapter) = &args.adapter {
        config.model.lora = Some(LoraSettings::at(adapter.clone()));
    }
    let result = evaluate(&config)?;
    let text = if args.json {
        serde_json::to_string_pretty(&result)?
    } else {
        format!(
            "val-core/{}/reward {:.4} over {} prompts",
            result.task, result.reward, result.prompts
        )
    };
    output::print(&(text + "\n"))
}
