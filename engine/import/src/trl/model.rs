//! What stands beside TRL's configurations: `ModelConfig`, the scripts' data, a trainer's own arguments and PEFT's.

use super::rewards::functions;
use crate::common::{NO_PYTHON, OWN_CONFIG, given, model, path};
use crate::entry::PROGRAM;
use crate::facts::Facts;
use crate::key_mapping::prelude::*;
use firebrick_engine::hub::HubName;
use serde_json::json;
use std::path::Path;

const FILES: &str = "write the dataset's name on the Hub, or its files, as task.train (docs/guides/data.md)";
const IN_NAME: &str = "it is in what dataset_name becomes";
const TYPES: &str = "master weights are f32, and bf16 or fp16 sets the compute type";
const OWN_KERNELS: &str = "attention is a built-in kernel";
const BITS: &str = "load_in_4bit controls whether weights are in 4 bits";
const NO_PEFT: &str = "use_peft is off: no adapters are trained";
const CAUSAL: &str = "the policy is a causal language model";
const LISTED: &str = "its arguments are listed in this table";
const OBSERVER: &str = "an Observer in Rust sees every step (src/lib.rs)";
const PLAIN: &str = "adapters are plain LoRA, started as PEFT starts them";

pub(super) const TABLE: KeyTable = (
    "",
    &[
        ("model_name_or_path", By(model_at_revision)),
        ("model_revision model_init_kwargs.revision", By(revision)),
        ("chat_template chat_template_path", By(template)),
        ("dtype torch_dtype model_init_kwargs.dtype model_init_kwargs.torch_dtype", NotNeeded(TYPES)),
        ("trust_remote_code model_init_kwargs.trust_remote_code", NotNeeded(NO_PYTHON)),
        ("attn_implementation model_init_kwargs.attn_implementation", NotNeeded(OWN_KERNELS)),
        ("use_peft", By(peft)),
        ("lora_r", If(has_peft, NO_PEFT, &To(given, "model.lora.rank"))),
        ("lora_alpha", If(has_peft, NO_PEFT, &To(given, "model.lora.alpha"))),
        ("lora_dropout", If(has_peft, NO_PEFT, &To(given, "model.lora.dropout"))),
        ("lora_target_modules", If(has_peft, NO_PEFT, &By(targets))),
        ("lora_target_parameters", If(has_peft, NO_PEFT, &To(given, "model.lora.target_parameters"))),
        ("use_rslora", If(has_peft, NO_PEFT, &To(given, "model.lora.use_rslora"))),
        ("lora_modules_to_save", Off("only adapters are trained")),
        ("lora_task_type", NotNeeded(CAUSAL)),
        ("use_dora", Off("adapters are plain LoRA")),
        ("load_in_8bit", To(base, "int8")),
        ("load_in_4bit", To(base, "nf4")),
        ("bnb_4bit_quant_type", By(code_of_bits)),
        ("bnb_4bit_compute_dtype", NotNeeded("weights are dequantized to the run's precision")),
        ("bnb_4bit_quant_storage", NotNeeded(BITS)),
        ("use_bnb_nested_quant", NotNeeded("scales of nf4 are always quantized too")),
        ("model_init_kwargs.low_cpu_mem_usage", NotNeeded("weights are read tensor by tensor")),
        ("model_init_kwargs.use_cache", NotNeeded("sampling always has a cache")),
        ("model_init_kwargs.device_map", NotNeeded("device selects the device of the model")),
        ("model_init_kwargs.output_router_logits", NotNeeded("it is in what router_aux_loss_coef becomes")),
        ("model_init_kwargs.**", Off(OWN_CONFIG)),
        ("dataset_name", By(dataset)),
        ("dataset_config dataset_train_split", NotNeeded(IN_NAME)),
        ("datasets", Off(FILES)),
        ("dataset_test_split", NotNeeded("task.train and task.validation are files")),
        ("dataset_streaming", NotNeeded("rows are read once, in the one process")),
        ("ignore_bias_buffers", NotNeeded("models have no such buffers")),
        ("reward_model_name_or_path reward_funcs", By(functions)),
        ("config", By(other_file)),
        (PROGRAM, NotNeeded("it names the algorithm")),
    ],
);

pub(super) const TRAINER: KeyTable = (
    "",
    &[
        ("{GRPO,RLOO,PPO}Trainer.model", By(trainer_model)),
        ("GRPOTrainer.reward_funcs RLOOTrainer.reward_funcs", By(functions)),
        ("PPOTrainer.reward_model PPOTrainer.value_model", By(object)),
        ("PPOTrainer.ref_model", NotNeeded("the reference is the policy before the first step")),
        ("{GRPO,RLOO,PPO}Trainer.args", NotNeeded(LISTED)),
        ("{GRPO,RLOO,PPO}Trainer.train_dataset", Off(FILES)),
        (
            "{GRPO,RLOO,PPO}Trainer.eval_dataset",
            NotNeeded("its rows are task.validation, which no training step reads"),
        ),
        ("{GRPO,RLOO,PPO}Trainer.peft_config", By(peft_config)),
        ("{GRPO,RLOO,PPO}Trainer.processing_class", NotNeeded("the model's tokenizer is used")),
        ("GRPOTrainer.reward_processing_classes", NotNeeded("a reward model encodes its input with its tokenizer")),
        ("{GRPO,RLOO,PPO}Trainer.callbacks", Off(OBSERVER)),
        (
            "GRPOTrainer.tools",
            Off("functions are not tools here: write them as methods of a class with `reset`, and name it in \
                 task.environment"),
        ),
        ("GRPOTrainer.environment_factory", By(environment)),
        ("GRPOTrainer.rollout_func", Off("rollouts are built in; turns are answered by a class, task.environment")),
        ("GRPOTrainer.optimizers", Off("AdamW is the optimizer")),
        ("load_dataset.**", NotNeeded("the program makes the trainer's train_dataset of it")),
        ("LoraConfig.r", To(given, "model.lora.rank")),
        ("LoraConfig.lora_alpha", To(given, "model.lora.alpha")),
        ("LoraConfig.lora_dropout", To(given, "model.lora.dropout")),
        ("LoraConfig.target_modules", By(targets)),
        ("LoraConfig.target_parameters LoraConfig.use_rslora", Under("model.lora")),
        ("LoraConfig.task_type", NotNeeded(CAUSAL)),
        ("LoraConfig.inference_mode", NotNeeded("adapters are trained")),
        ("LoraConfig.init_lora_weights", By(started)),
        ("LoraConfig.bias", Off("biases are not trained with adapters")),
        ("LoraConfig.**", Off(PLAIN)),
    ],
);

/// A file with more settings.
pub(super) fn other_file(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(file) if !asked.facts.reads(file) => cannot(format!(
            "its settings are in {file}, which is not among the files: import it before this one, `firebrick import \
             {file} …`"
        )),
        _ => not_needed("the keys of that file are listed in this table"),
    }
}

/// The revision of the model that is not the main one.
fn of_model(facts: &Facts) -> Option<&str> {
    let named = ["model_revision", "model_init_kwargs.revision"].into_iter().find_map(|key| facts.text(key));
    named.filter(|revision| *revision != "main")
}

/// The model, with its revision where it has one.
fn model_at_revision(asked: &SourceKey) -> MappedKey {
    match (asked.text(), of_model(asked.facts)) {
        (Some(name), Some(revision)) if HubName::is_one(name, Path::new(".")) => {
            model(&asked.with(&json!(format!("{name}@{revision}"))))
        }
        _ => model(asked),
    }
}

fn revision(asked: &SourceKey) -> MappedKey {
    let name = ["model_name_or_path", "GRPOTrainer.model", "RLOOTrainer.model", "PPOTrainer.model"];
    let name = name.into_iter().find_map(|key| asked.facts.text(key));
    match asked.text() {
        None | Some("main") => not_needed("the main revision, as here by default"),
        Some(_) if name.is_some_and(|name| HubName::is_one(name, Path::new("."))) => {
            not_needed("it is in model.path, as owner/name@revision")
        }
        Some(revision) => cannot(format!("model.path takes a revision behind the name, as owner/name@{revision}")),
    }
}

fn template(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(text) if asked.key == "chat_template" => set("model.chat_template", text),
        Some(file) if Path::new(file).extension().is_some_and(|own| own == "jinja") => {
            set("model.chat_template", path(asked.facts, file))
        }
        Some(folder) => cannot(format!(
            "it is the template of the tokenizer in {folder}: write its chat_template.jinja as model.chat_template"
        )),
        None => not_needed("the tokenizer's template is used"),
    }
}

/// A dataset whose rows TRL's and open-r1's scripts take as they are.
fn dataset(asked: &SourceKey) -> MappedKey {
    let facts = asked.facts;
    let Some(name) = asked.text() else {
        return asked.off_or_wrong("a dataset");
    };
    let parts = [("dataset_config", "default"), ("dataset_train_split", "train")];
    let part = parts.into_iter().find_map(|(key, plain)| facts.text(key).filter(|own| *own != plain));
    match part {
        Some(part) => cannot(format!(
            "its part `{part}` is some of its files: write them as task.train, such as \
             hf://datasets/{name}/{part}/*.parquet"
        )),
        None => set("task.train", path(facts, name)).noted("its rows as they are, without what a program does to them"),
    }
}

/// How PEFT starts adapters.
fn started(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("adapters are started so");
    }
    cannot("adapters are started as PEFT starts them with init_lora_weights=True")
}

/// A class by its name; the file that defines it where the name has its module.
fn environment(asked: &SourceKey) -> MappedKey {
    let Some(name) = asked.text() else {
        return if asked.is_off() {
            not_needed("one turn a rollout, as here without task.environment")
        } else {
            cannot(
                "rollouts of a run have environments of one class here: name it in task.environment ({kind: python, file, class})",
            )
        };
    };
    let of = |file: &str, class: &str| {
        set("task.environment", json!({"kind": "python", "file": path(asked.facts, file), "class": class}))
    };
    if let Some(place) = asked.facts.definition(name) {
        return of(&place.file, name);
    }
    let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || "_.".contains(c));
    match name.rsplit_once('.').filter(|_| is_name) {
        Some((module, class)) => of(&format!("{}.py", module.replace('.', "/")), class),
        None => cannot(format!(
            "write task.environment: {{kind: python, file: FILE, class: {name}}} with the file that defines `{name}`"
        )),
    }
}

fn has_peft(asked: &SourceKey) -> bool {
    asked.facts.is_on("use_peft")
}

fn peft(asked: &SourceKey) -> MappedKey {
    if !asked.is_on() {
        return off();
    }
    // PEFT's and TRL's own rank and alpha, where the files say nothing else
    let own = |key: &str, default: u64| plain(asked.facts.value(key).unwrap_or(&default.into()));
    set_all([("model.lora.rank", own("lora_r", 16)), ("model.lora.alpha", own("lora_alpha", 32))])
}

/// `load_in_8bit` and `load_in_4bit`.
fn base(asked: &SourceKey, format: &str) -> MappedKey {
    match asked.is_off() {
        true => off(),
        false if has_peft(asked) => set("model.lora.base", format),
        false => cannot("quantized weights are not trained; train adapters instead: use_peft"),
    }
}

fn code_of_bits(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(code) if code != "nf4" && asked.facts.is_on("load_in_4bit") => {
            cannot("4-bit weights are in nf4: model.lora.base")
        }
        _ => not_needed(BITS),
    }
}

/// TRL's flag takes a list, of which one word may stand for all.
fn targets(asked: &SourceKey) -> MappedKey {
    let all = json!("all-linear");
    let is_all = asked.value.as_array().is_some_and(|list| list.len() == 1 && list[0] == all);
    given(&if is_all { asked.with(&all) } else { *asked }, "model.lora.target_modules")
}

fn trainer_model(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(name) if name.contains('/') && !name.contains(['(', ' ']) => model_at_revision(asked),
        _ if asked.facts.value("model_name_or_path").is_some() || asked.facts.value("sft_model_path").is_some() => {
            not_needed("set by model_name_or_path")
        }
        _ => cannot("it is an object of the program: write the model's folder as model.path"),
    }
}

fn object(asked: &SourceKey) -> MappedKey {
    if asked.facts.value("reward_model_path").is_some() {
        return not_needed("set by reward_model_path and the critic's section");
    }
    cannot("it is an object of the program: write its folder into the configuration (task.rewards, critic.model.path)")
}

fn peft_config(asked: &SourceKey) -> MappedKey {
    let is_listed = asked.facts.keys().any(|key| key.starts_with("LoraConfig."));
    match asked.text() {
        // without arguments of its own, a call has PEFT's defaults
        Some(call) if call.contains("LoraConfig(") && !is_listed => {
            set_all([("model.lora.rank", 8.into()), ("model.lora.alpha", 8.into())]).noted("PEFT's defaults")
        }
        Some(_) if is_listed || asked.facts.keys().any(|key| key == "use_peft") => not_needed(LISTED),
        None => not_needed("no adapters, as here by default"),
        Some(_) => cannot("it is an object of the program: write rank and alpha under model.lora"),
    }
}
