//! What stands beside TRL's configurations: `ModelConfig`, the scripts' data, a trainer's own arguments, PEFT's and
//! Accelerate's.

use super::batch::devices;
use super::rewards::functions;
use crate::common::{model, path, precision, ranks};
use crate::entry::PROGRAM;
use crate::facts::Facts;
use crate::key_mapping::KeyMapping::{By, NotNeeded, Off, Same};
use crate::key_mapping::{KeyRule, MappedKey, SourceKey, cannot, not_needed, plain, set, set_noted};
use firebrick_engine::hub::HubName;
use serde_json::json;
use std::path::Path;

const NO_PYTHON: &str = "no Python is run: model families are built in";
const FILES: &str = "write the dataset's name on the Hub, or its files, as task.train (docs/guides/data.md)";
const SPLIT: &str = "task.train and task.validation are files";
const EVALUATED: &str = "its rows are task.validation, which no training step reads";
const SHARDS: &str = "memory.zero_stage shards state over the ranks of `mpirun`; one rank has nothing to shard";
const OWN_KERNELS: &str = "attention is a built-in kernel";
const LAUNCH: &str = "one process: nothing is launched";
const BITS: &str = "load_in_4bit controls whether weights are in 4 bits";

pub(super) const MODEL: &[KeyRule] = &[
    ("model_name_or_path", By(model_at_revision)),
    ("model_revision", By(revision)),
    ("chat_template", By(template)),
    ("chat_template_path", By(template)),
    ("dtype", NotNeeded("master weights are f32, and bf16 or fp16 sets the compute type")),
    ("torch_dtype", NotNeeded("master weights are f32, and bf16 or fp16 sets the compute type")),
    ("trust_remote_code", NotNeeded(NO_PYTHON)),
    ("attn_implementation", NotNeeded(OWN_KERNELS)),
    ("use_peft", By(peft)),
    ("lora_r", By(|a| adapters(a, "rank"))),
    ("lora_alpha", By(|a| adapters(a, "alpha"))),
    ("lora_dropout", By(|a| adapters(a, "dropout"))),
    ("lora_target_modules", By(|a| adapters(a, "target_modules"))),
    ("use_rslora", By(|a| adapters(a, "use_rslora"))),
    ("lora_modules_to_save", Off("only adapters are trained")),
    ("lora_target_parameters", By(|a| adapters(a, "target_parameters"))),
    ("lora_task_type", NotNeeded("the policy is a causal language model")),
    ("use_dora", Off("adapters are plain LoRA")),
    ("load_in_8bit", By(|a| base(a, "int8"))),
    ("load_in_4bit", By(|a| base(a, "nf4"))),
    ("bnb_4bit_quant_type", By(code_of_bits)),
    ("bnb_4bit_compute_dtype", NotNeeded("weights are dequantized to the run's precision")),
    ("bnb_4bit_quant_storage", NotNeeded(BITS)),
    ("use_bnb_nested_quant", NotNeeded("scales of nf4 are always quantized too")),
    ("model_init_kwargs.dtype", NotNeeded("master weights are f32, and bf16 or fp16 sets the compute type")),
    ("model_init_kwargs.torch_dtype", NotNeeded("master weights are f32, and bf16 or fp16 sets the compute type")),
    ("model_init_kwargs.attn_implementation", NotNeeded(OWN_KERNELS)),
    ("model_init_kwargs.revision", By(revision)),
    ("model_init_kwargs.trust_remote_code", NotNeeded(NO_PYTHON)),
    ("model_init_kwargs.low_cpu_mem_usage", NotNeeded("weights are read tensor by tensor")),
    ("model_init_kwargs.use_cache", NotNeeded("sampling always has a cache")),
    ("model_init_kwargs.device_map", NotNeeded("device selects the device of the model")),
    (
        "model_init_kwargs.output_router_logits",
        NotNeeded("router_aux_loss_coef becomes model.router_aux_loss_coef with it"),
    ),
    ("model_init_kwargs.**", Off("the model's config.json defines the model: edit it in the folder")),
    ("dataset_name", By(dataset)),
    ("dataset_config", NotNeeded("it is in what dataset_name becomes")),
    ("datasets", Off(FILES)),
    ("dataset_train_split", NotNeeded("it is in what dataset_name becomes")),
    ("dataset_test_split", NotNeeded(SPLIT)),
    ("dataset_streaming", NotNeeded("rows are read once, in the one process")),
    ("ignore_bias_buffers", NotNeeded("models have no such buffers")),
    ("reward_model_name_or_path", By(functions)),
    ("reward_funcs", By(functions)),
    ("config", By(other_file)),
    (PROGRAM, NotNeeded("it names the algorithm")),
];

pub(super) const TRAINER: &[KeyRule] = &[
    ("GRPOTrainer.model", By(trainer_model)),
    ("RLOOTrainer.model", By(trainer_model)),
    ("PPOTrainer.model", By(trainer_model)),
    ("GRPOTrainer.reward_funcs", By(functions)),
    ("RLOOTrainer.reward_funcs", By(functions)),
    ("PPOTrainer.reward_model", By(object)),
    ("PPOTrainer.value_model", By(object)),
    ("PPOTrainer.ref_model", NotNeeded("the reference is the policy before the first step")),
    ("GRPOTrainer.args", NotNeeded("its arguments are listed in this table")),
    ("RLOOTrainer.args", NotNeeded("its arguments are listed in this table")),
    ("PPOTrainer.args", NotNeeded("its arguments are listed in this table")),
    ("GRPOTrainer.train_dataset", Off(FILES)),
    ("RLOOTrainer.train_dataset", Off(FILES)),
    ("PPOTrainer.train_dataset", Off(FILES)),
    ("GRPOTrainer.eval_dataset", NotNeeded(EVALUATED)),
    ("RLOOTrainer.eval_dataset", NotNeeded(EVALUATED)),
    ("PPOTrainer.eval_dataset", NotNeeded(EVALUATED)),
    ("GRPOTrainer.peft_config", By(peft_config)),
    ("RLOOTrainer.peft_config", By(peft_config)),
    ("PPOTrainer.peft_config", By(peft_config)),
    ("GRPOTrainer.processing_class", NotNeeded("the model's tokenizer is used")),
    ("RLOOTrainer.processing_class", NotNeeded("the model's tokenizer is used")),
    ("PPOTrainer.processing_class", NotNeeded("the model's tokenizer is used")),
    ("GRPOTrainer.reward_processing_classes", NotNeeded("a reward model encodes its input with its tokenizer")),
    ("GRPOTrainer.callbacks", Off("an Observer in Rust sees every step (src/lib.rs)")),
    ("RLOOTrainer.callbacks", Off("an Observer in Rust sees every step (src/lib.rs)")),
    ("PPOTrainer.callbacks", Off("an Observer in Rust sees every step (src/lib.rs)")),
    (
        "GRPOTrainer.tools",
        Off("functions are not tools here: write them as methods of a class with `reset`, and name it in \
             task.environment"),
    ),
    ("GRPOTrainer.environment_factory", By(environment)),
    ("GRPOTrainer.rollout_func", Off("rollouts are built in; turns are answered by a class, task.environment")),
    ("GRPOTrainer.optimizers", Off("AdamW is the optimizer")),
    ("load_dataset.**", NotNeeded("the program makes the trainer's train_dataset of it")),
    ("LoraConfig.r", By(|a| with_lora(a, "rank"))),
    ("LoraConfig.lora_alpha", By(|a| with_lora(a, "alpha"))),
    ("LoraConfig.lora_dropout", By(|a| with_lora(a, "dropout"))),
    ("LoraConfig.target_modules", By(|a| with_lora(a, "target_modules"))),
    ("LoraConfig.target_parameters", By(|a| with_lora(a, "target_parameters"))),
    ("LoraConfig.use_rslora", By(|a| with_lora(a, "use_rslora"))),
    ("LoraConfig.task_type", NotNeeded("the policy is a causal language model")),
    ("LoraConfig.inference_mode", NotNeeded("adapters are trained")),
    ("LoraConfig.init_lora_weights", By(started)),
    ("LoraConfig.bias", Off("biases are not trained with adapters")),
    ("LoraConfig.**", Off("adapters are plain LoRA, started as PEFT starts them")),
];

pub(super) const ACCELERATE: &[KeyRule] = &[
    ("num_processes", By(processes)),
    ("num_machines", By(|a| ranks(a, "trainer.nnodes"))),
    ("nproc_per_node", By(|a| ranks(a, "trainer.n_gpus_per_node"))),
    ("mixed_precision", By(mixed)),
    ("distributed_type", NotNeeded(LAUNCH)),
    ("compute_environment", NotNeeded(LAUNCH)),
    ("num_gpus", By(|a| ranks(a, "trainer.n_gpus_per_node"))),
    ("include", By(named_devices)),
    ("nnodes", By(|a| ranks(a, "trainer.nnodes"))),
    ("num_nodes", By(|a| ranks(a, "trainer.nnodes"))),
    ("node_rank", NotNeeded(LAUNCH)),
    ("master_addr", NotNeeded(LAUNCH)),
    ("master_port", NotNeeded(LAUNCH)),
    ("rdzv_endpoint", NotNeeded(LAUNCH)),
    ("rdzv_id", NotNeeded(LAUNCH)),
    ("standalone", NotNeeded(LAUNCH)),
    ("max_restarts", NotNeeded(LAUNCH)),
    ("hostfile", NotNeeded(LAUNCH)),
    ("use_deepspeed", NotNeeded(SHARDS)),
    ("use_fsdp", NotNeeded(SHARDS)),
    ("zero_stage", Same("memory.zero_stage")),
    ("config_file", By(launch_file)),
    ("accelerate_config", By(launch_file)),
    ("deepspeed_config.offload_optimizer_device", By(|a| offload(a, "memory.optimizer_offload", "cpu"))),
    ("deepspeed_config.offload_param_device", By(|a| offload(a, "memory.param_offload", "streamed"))),
    ("deepspeed_config.gradient_accumulation_steps", NotNeeded("the trainer's gradient_accumulation_steps applies")),
    ("deepspeed_config.zero_stage", Same("memory.zero_stage")),
    ("deepspeed_config.**", NotNeeded(SHARDS)),
    ("fsdp_config.fsdp_offload_params", By(|a| offload(a, "memory.param_offload", "streamed"))),
    ("fsdp_config.fsdp_activation_checkpointing", By(|a| offload(a, "memory.gradient_checkpointing", true))),
    ("fsdp_config.**", NotNeeded(SHARDS)),
    ("machine_rank", NotNeeded(LAUNCH)),
    ("main_process_ip", NotNeeded(LAUNCH)),
    ("main_process_port", NotNeeded(LAUNCH)),
    ("main_training_function", NotNeeded(LAUNCH)),
    ("rdzv_backend", NotNeeded(LAUNCH)),
    ("same_network", NotNeeded(LAUNCH)),
    ("gpu_ids", NotNeeded("device selects it: cuda:0")),
    ("downcast_bf16", NotNeeded(LAUNCH)),
    ("debug", NotNeeded(LAUNCH)),
    ("dynamo_config.**", NotNeeded("kernels are compiled by the backend")),
    ("enable_cpu_affinity", NotNeeded(LAUNCH)),
    ("tpu_env", NotNeeded(LAUNCH)),
    ("tpu_use_cluster", NotNeeded(LAUNCH)),
    ("tpu_use_sudo", NotNeeded(LAUNCH)),
    ("multi_gpu", NotNeeded(LAUNCH)),
];

/// A file with more settings.
fn other_file(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        Some(file) if !asked.facts.reads(file) => cannot(format!(
            "its settings are in {file}, which is not among the files: import it before this one, `firebrick import \
             {file} …`"
        )),
        _ => not_needed("the keys of that file are listed in this table"),
    }
}

/// Accelerate's file: what of it changes results is the number of devices.
fn launch_file(asked: &SourceKey) -> MappedKey {
    match devices(asked.facts) {
        Some(_) => not_needed("the number of devices is known; how they shard changes no result"),
        None => other_file(asked),
    }
}

/// `localhost:0,1,2,3`.
fn named_devices(asked: &SourceKey) -> MappedKey {
    match devices(asked.facts) {
        Some(n) => ranks(&SourceKey { value: &json!(n), ..*asked }, "trainer.n_gpus_per_node"),
        None => asked.wrong("devices such as localhost:0,1"),
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
            model(&SourceKey { value: &json!(format!("{name}@{revision}")), ..*asked })
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
        Some(text) if asked.key == "chat_template" || Path::new(text).extension().is_some_and(|own| own == "jinja") => {
            let is_path = asked.key == "chat_template_path";
            set("model.chat_template", if is_path { path(asked.facts, text) } else { text.to_owned() })
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
        return if asked.is_off() { not_needed("has no value in the files") } else { asked.wrong("a dataset") };
    };
    let parts = [("dataset_config", "default"), ("dataset_train_split", "train")];
    let part = parts.into_iter().find_map(|(key, plain)| facts.text(key).filter(|own| *own != plain));
    match part {
        Some(part) => cannot(format!(
            "its part `{part}` is some of its files: write them as task.train, such as \
             hf://datasets/{name}/{part}/*.parquet"
        )),
        None => set_noted("task.train", path(facts, name), "its rows as they are, without what a program does to them"),
    }
}

/// How PEFT starts adapters.
fn started(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        return not_needed("adapters are started so");
    }
    cannot("adapters are started as PEFT starts them with init_lora_weights=True")
}

/// Processes of all machines together.
fn processes(asked: &SourceKey) -> MappedKey {
    let machines = asked.facts.whole("num_machines").unwrap_or(1).max(1);
    match asked.whole() {
        Some(n) if n > 0 && n % machines == 0 => {
            let own = SourceKey { value: &json!(n / machines), ..*asked };
            ranks(&own, "trainer.n_gpus_per_node")
        }
        Some(n) if n > 0 => {
            cannot(format!("{n} processes are not as many on each of {machines} machines; give each the same number"))
        }
        _ => asked.wrong("a number of processes"),
    }
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
    if let Some(place) = asked.facts.definition(name) {
        let file = path(asked.facts, &place.file);
        return set("task.environment", json!({"kind": "python", "file": file, "class": name}));
    }
    let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || "_.".contains(c));
    match name.rsplit_once('.').filter(|_| is_name) {
        Some((module, class)) => {
            let file = format!("{}.py", module.replace('.', "/"));
            set("task.environment", json!({"kind": "python", "file": path(asked.facts, &file), "class": class}))
        }
        None => cannot(format!(
            "write task.environment: {{kind: python, file: FILE, class: {name}}} with the file that defines `{name}`"
        )),
    }
}

fn peft(asked: &SourceKey) -> MappedKey {
    if asked.is_on() {
        // PEFT's and TRL's own rank and alpha, where the files say nothing else
        let own = |key: &str, default: u64| plain(asked.facts.value(key).unwrap_or(&default.into()));
        return MappedKey::Set(
            vec![("model.lora.rank".into(), own("lora_r", 16)), ("model.lora.alpha".into(), own("lora_alpha", 32))],
            String::new(),
        );
    }
    not_needed("off, as here by default")
}

fn adapters(asked: &SourceKey, key: &str) -> MappedKey {
    if !asked.facts.is_on("use_peft") {
        return not_needed("use_peft is off: no adapters are trained");
    }
    with_lora(asked, key)
}

/// `load_in_8bit` and `load_in_4bit`.
fn base(asked: &SourceKey, format: &str) -> MappedKey {
    if asked.is_off() {
        return not_needed("off, as here by default");
    }
    if !asked.facts.is_on("use_peft") {
        return cannot("quantized weights are not trained; train adapters instead: use_peft");
    }
    set("model.lora.base", format)
}

fn code_of_bits(asked: &SourceKey) -> MappedKey {
    match asked.text() {
        None | Some("nf4") => not_needed(BITS),
        Some(_) if !asked.facts.is_on("load_in_4bit") => not_needed(BITS),
        Some(_) => cannot("4-bit weights are in nf4: model.lora.base"),
    }
}

fn with_lora(asked: &SourceKey, key: &str) -> MappedKey {
    match asked.value {
        value if value.is_null() => not_needed("has no value in the files"),
        // TRL's flag takes a list, of which one word may stand for all
        serde_json::Value::Array(list) if list.len() == 1 && list[0] == "all-linear" => {
            set(&format!("model.lora.{key}"), "all-linear")
        }
        value => set(&format!("model.lora.{key}"), plain(value)),
    }
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
    match asked.text() {
        // a call's own arguments stand in the table; without any they are PEFT's defaults
        Some(call) if call.contains("LoraConfig(") && !asked.facts.keys().any(|key| key.starts_with("LoraConfig.")) => {
            MappedKey::Set(
                vec![("model.lora.rank".into(), 8.into()), ("model.lora.alpha".into(), 8.into())],
                "PEFT's defaults".into(),
            )
        }
        Some(_) if asked.facts.keys().any(|key| key.starts_with("LoraConfig.") || key == "use_peft") => {
            not_needed("its arguments are listed in this table")
        }
        None => not_needed("no adapters, as here by default"),
        Some(_) => cannot("it is an object of the program: write rank and alpha under model.lora"),
    }
}

fn mixed(asked: &SourceKey) -> MappedKey {
    if asked.text() == Some("no") || asked.facts.is_on("bf16") || asked.facts.is_on("fp16") {
        return not_needed("the trainer's bf16 or fp16 applies");
    }
    precision(asked)
}

fn offload(asked: &SourceKey, key: &str, value: impl Into<serde_json::Value>) -> MappedKey {
    if asked.is_off() {
        return not_needed("off, as here by default");
    }
    let recomputes =
        asked.facts.is_on("gradient_checkpointing") || asked.facts.is_on("fsdp_config.fsdp_activation_checkpointing");
    if key == "memory.param_offload" && !recomputes {
        return cannot(
            "weights are streamed segment by segment only if segments are recomputed: turn gradient_checkpointing on \
             too",
        );
    }
    set(key, value)
}
