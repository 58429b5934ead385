//! The largest single tensors of a run. A device may hold gigabytes and bind no buffer above 128 MiB, as WebGPU may.

use crate::estimate::{Sizes, Workload};
use crate::request::Request;
use crate::size::Bytes;
use crate::{Error, ModelPlan, Plan, Result, Role};
use firebrick_arch::lora::LoraConfig;
use firebrick_arch::{Arch, KvCacheDtype};
use firebrick_spec::{BLOCK_SIZE, KernelTable};
use std::fmt::Write;

const F32: u64 = 4;

/// A tensor that a run makes.
struct Buffer {
    what: String,
    bytes: u64,
    /// Advice to make it smaller.
    smaller: &'static str,
}

/// Bytes of the largest tensor for each of what a setting counts.
struct BytesPer {
    /// A row of the head: logits, of a tile where kernels take the vocabulary in tiles.
    head_row: u64,
    /// A token: activations of the MLP or of the queries.
    token: u64,
    /// A sequence that is sampled: its logits, or its keys in one layer.
    sequence: u64,
}

impl BytesPer {
    fn new(arch: &Arch, workload: &Workload, kernels: &KernelTable) -> Self {
        let vocab = arch.head_width() as u64;
        let tile = kernels.vocabulary_tile.map_or(vocab, |tile| tile as u64);
        let columns = vocab.min(tile);
        // rows by expert, one for each of a token's
        let experts = arch.expert_layers().map(|(_, experts)| {
            let width = experts.intermediate_size.max(arch.hidden_size);
            experts.per_token * width
        });
        let experts = experts.max().unwrap_or(0);
        let widest = arch.intermediate_size.max(arch.num_heads * arch.head_dim).max(arch.hidden_size).max(experts);
        let slots = workload.length().next_multiple_of(BLOCK_SIZE as u64);
        let keys = slots * (arch.num_kv_heads * arch.head_dim) as u64;
        let number = match workload.kv_cache_dtype {
            KvCacheDtype::Auto => workload.rollout_precision.width(),
            KvCacheDtype::Int8 => 1,
        };
        Self {
            head_row: F32 * columns,
            token: arch.precision.width() * widest as u64,
            sequence: (F32 * vocab).max(number * keys),
        }
    }
}

/// A model of a run.
struct Model<'a> {
    who: &'static str,
    arch: &'a Arch,
    plan: &'a ModelPlan,
    lora: Option<&'a LoraConfig>,
    trained: bool,
}

impl Model<'_> {
    /// Every kind of its tensors that may be too large.
    fn buffers(&self, workload: &Workload, kernels: &KernelTable) -> Vec<Buffer> {
        let sizes = Sizes::new(self.arch, self.lora);
        let each = BytesPer::new(self.arch, workload, kernels);
        // a budget may be larger than what there is
        let warm = workload.warm_up.map_or(0, |warm_up| warm_up.batch * warm_up.length);
        let there = (workload.rollouts().max(1) * workload.scored_length()).max(warm);
        let tokens = there.min(self.plan.train_tokens.max(self.plan.score_tokens) as u64);
        let buffer = |what: &str, bytes, smaller| Buffer { what: format!("the {}'s {what}", self.who), bytes, smaller };
        let mut buffers = vec![
            buffer("largest matrix", sizes.width * sizes.largest, "precision: bf16 or f16 halves it"),
            buffer(
                "activations of a micro-batch",
                each.token * tokens,
                "lower memory.train_tokens and memory.score_tokens, or lengths",
            ),
            buffer(
                "logits of a chunk",
                each.head_row * (self.plan.head_rows as u64).min(tokens),
                "lower memory.head_rows",
            ),
        ];
        if self.trained {
            buffers.push(buffer(
                "gradient or moments of its largest matrix",
                F32 * sizes.largest_trained,
                "model.lora trains small matrices instead",
            ));
        }
        buffers
    }
}

/// Every kind of tensor that may be too large, of every model on the run's device.
fn buffers(workload: &Workload, plan: &Plan, kernels: &KernelTable) -> Vec<Buffer> {
    let model = |role: Role, plan| {
        let (who, arch, lora) = match role {
            Role::Policy => ("policy", &workload.arch, workload.lora.as_ref()),
            Role::Reference => ("reference policy", &workload.arch, None),
            Role::Critic => ("critic", workload.critic_arch()?, None),
            // those have plans of their own
            Role::RewardModel => return None,
        };
        Some(Model { who, arch, plan, lora, trained: role != Role::Reference })
    };
    let rewards = workload.rewards.iter().map(|reward| Model {
        who: "reward model",
        arch: &reward.arch,
        plan: &reward.plan,
        lora: None,
        trained: false,
    });
    let models = plan.models.iter().filter_map(|(role, plan)| model(*role, plan));
    let mut buffers: Vec<Buffer> = models.chain(rewards).flat_map(|model| model.buffers(workload, kernels)).collect();
    if workload.samples() {
        let each = BytesPer::new(&workload.arch, workload, kernels);
        buffers.push(Buffer {
            what: "the sampling buffer of a layer's keys, or of logits".into(),
            bytes: each.sequence * (plan.rollout.max_num_seqs as u64).min(workload.rollouts().max(1)),
            smaller: "lower rollout.max_num_seqs, or lengths",
        });
    }
    buffers
}

impl Request {
    /// Rejects a plan with tensors above the device's largest buffer.
    ///
    /// # Errors
    /// `Error::Plan` with every tensor that is too large, its bytes, and how to make it smaller.
    pub fn check_buffers(&self, plan: &Plan) -> Result<()> {
        let Some(limit) = self.profile.largest_buffer else {
            return Ok(());
        };
        if self.parallel.is_several() {
            // arithmetic for machines that are not here
            return Ok(());
        }
        let mut too_large = String::new();
        for buffer in buffers(&self.workload, plan, &self.profile.kernels) {
            if buffer.bytes > limit {
                let (bytes, Buffer { what, smaller, .. }) = (Bytes(buffer.bytes), &buffer);
                let _ = write!(too_large, "\n  {what}: {bytes}; {smaller}");
            }
        }
        if too_large.is_empty() {
            return Ok(());
        }
        Err(Error::Plan(format!(
            "{} cannot hold a tensor above {} in one piece, and the plan has larger tensors:{too_large}",
            self.profile.name,
            Bytes(limit)
        )))
    }

    /// The request with limits low enough that no tensor is too large for the device.
    pub(super) fn within_buffers(&self) -> Self {
        let mut capped = self.clone();
        let Some(limit) = self.profile.largest_buffer else {
            return capped;
        };
        let each = BytesPer::new(&self.workload.arch, &self.workload, &self.profile.kernels);
        let cap = |value: &mut usize, bytes: u64, least: u64| {
            let most = (limit / bytes.max(1)).max(least).max(1);
            *value = (*value).min(usize::try_from(most).unwrap_or(usize::MAX));
        };
        // a sequence has to fit; where it does not, `check` says so
        let length = self.workload.scored_length();
        cap(&mut capped.memory.head_rows, each.head_row, 1);
        let longest = self.workload.longest_pass();
        cap(&mut capped.memory.train_tokens, each.token, longest);
        cap(&mut capped.memory.score_tokens, each.token, length);
        cap(&mut capped.max_num_seqs, each.sequence, 1);
        capped
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemoryConfig;
    use crate::estimate::{Parallel, RewardWork};
    use crate::test_support::device;
    use firebrick_spec::Backend;
    use serde_json::{Value, json};
    use std::collections::BTreeMap;
    use std::path::Path;

    /// A device that binds 128 MiB at most.
    fn small_buffers() -> Request {
        let Value::Object(config) = json!({
            "model_type": "qwen2", "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 768,
            "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2
        }) else {
            unreachable!("an object")
        };
        let arch = Arch::from_config(&config, Path::new("test")).expect("an architecture");
        let mut profile = device(Backend::Wgpu);
        profile.largest_buffer = Some(128 << 20);
        Request {
            workload: Workload::grpo(arch, [256, 256], 64, 8),
            memory: MemoryConfig::default(),
            max_num_seqs: 64,
            profile,
            budget: None,
            host_budget: None,
            phase_limits: BTreeMap::new(),
            parallel: Parallel::default(),
            ranks: 1,
        }
    }

    #[test]
    fn a_tensor_that_the_device_cannot_hold_in_one_piece_is_named_with_what_makes_it_smaller() {
        let mut request = small_buffers();
        assert!(request.as_configured().is_ok());
        request.memory.train_tokens = 1 << 20;
        let message = request.as_configured().expect_err("too large").to_string();
        for part in ["128 MiB", "activations", "memory.train_tokens"] {
            assert!(message.contains(part), "{message}");
        }
        request.profile.largest_buffer = None;
        assert!(request.as_configured().is_ok(), "no limit is known");
    }

    #[test]
    fn a_reward_model_on_the_run_s_device_is_looked_at_too() {
        let mut request = small_buffers();
        let plan = request.as_configured().expect("a plan").plan;
        let mut arch = request.workload.arch.clone();
        arch.vocab_size = 1 << 20;
        request.workload.rewards.push(RewardWork { arch, plan: plan.policy().clone() });
        let message = request.check_buffers(&plan).expect_err("too large").to_string();
        assert!(message.contains("the reward model's largest matrix"), "{message}");
    }

    #[test]
    fn the_planner_proposes_no_tensor_that_is_too_large() {
        let mut request = small_buffers();
        request.memory.train_tokens = 1 << 20;
        request.memory.head_rows = 1 << 20;
        request.max_num_seqs = 1 << 20;
        request.budget = Some(64 << 30);
        let fit = request.fit().expect("fits");
        assert!(request.check_buffers(&fit.plan).is_ok());
        assert!(fit.plan.policy().train_tokens < 1 << 20);
    }
}
