//! Launchers' arguments and Accelerate's files: what of them changes results is the number of devices.

use super::batch::devices;
use super::model::other_file;
use crate::common::{precision, ranks};
use crate::key_mapping::prelude::*;
use serde_json::json;

const SHARDS: &str = "memory.zero_stage shards state over the ranks of `mpirun`; one rank has nothing to shard";
const LAUNCH: &str = "one process: nothing is launched";

pub(super) const ACCELERATE: KeyTable = (
    "",
    &[
        ("num_processes", By(processes)),
        ("num_machines nnodes num_nodes", To(ranks, "trainer.nnodes")),
        ("nproc_per_node num_gpus", To(ranks, "trainer.n_gpus_per_node")),
        ("include", By(named_devices)),
        ("mixed_precision", By(mixed)),
        (
            "distributed_type compute_environment node_rank master_addr master_port rdzv_endpoint rdzv_id standalone \
             max_restarts hostfile machine_rank main_process_ip main_process_port main_training_function rdzv_backend \
             same_network downcast_bf16 debug enable_cpu_affinity tpu_env tpu_use_cluster tpu_use_sudo multi_gpu",
            NotNeeded(LAUNCH),
        ),
        ("use_deepspeed use_fsdp deepspeed_config.** fsdp_config.**", NotNeeded(SHARDS)),
        ("zero_stage deepspeed_config.zero_stage", Same("memory.zero_stage")),
        ("config_file accelerate_config", By(launch_file)),
        ("deepspeed_config.offload_optimizer_device", By(|a| offload(a, "memory.optimizer_offload", "cpu"))),
        (
            "deepspeed_config.offload_param_device fsdp_config.fsdp_offload_params",
            By(|a| match a.is_off() || recomputes(a) {
                true if a.is_off() => off(),
                true => set("memory.param_offload", "streamed"),
                false => cannot(NO_STREAM),
            }),
        ),
        (
            "deepspeed_config.gradient_accumulation_steps",
            NotNeeded("the trainer's gradient_accumulation_steps applies"),
        ),
        ("fsdp_config.fsdp_activation_checkpointing", By(|a| offload(a, "memory.gradient_checkpointing", true))),
        ("gpu_ids", NotNeeded("device selects it: cuda:0")),
        ("dynamo_config.**", NotNeeded("kernels are compiled by the backend")),
    ],
);

const NO_STREAM: &str =
    "weights are streamed segment by segment only if segments are recomputed: turn gradient_checkpointing on too";

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
        Some(n) => ranks(&asked.with(&json!(n)), "trainer.n_gpus_per_node"),
        None => asked.wrong("devices such as localhost:0,1"),
    }
}

/// Processes of all machines together.
fn processes(asked: &SourceKey) -> MappedKey {
    let machines = asked.facts.whole("num_machines").unwrap_or(1).max(1);
    match asked.count() {
        Some(n) if n % machines == 0 => ranks(&asked.with(&json!(n / machines)), "trainer.n_gpus_per_node"),
        Some(n) => {
            cannot(format!("{n} processes are not as many on each of {machines} machines; give each the same number"))
        }
        None => asked.wrong("a number of processes"),
    }
}

fn mixed(asked: &SourceKey) -> MappedKey {
    if asked.text() == Some("no") || asked.facts.is_on("bf16") || asked.facts.is_on("fp16") {
        return not_needed("the trainer's bf16 or fp16 applies");
    }
    precision(asked)
}

fn recomputes(asked: &SourceKey) -> bool {
    ["gradient_checkpointing", "fsdp_config.fsdp_activation_checkpointing"].iter().any(|key| asked.facts.is_on(key))
}

fn offload(asked: &SourceKey, key: &str, value: impl Into<serde_json::Value>) -> MappedKey {
    if asked.is_off() { off() } else { set(key, value) }
}
