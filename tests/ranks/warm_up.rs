//! A critic that starts from a policy which ranks share and have warmed up.

use super::tensor_parallel::{Case, learn_as_one_rank_and_repeat};

#[test]
fn a_critic_starts_from_the_policy_that_ranks_have_warmed_up_together() {
    let folders = tempfile::tempdir().unwrap();
    let plain = ["objective.name=ppo", "critic.warmup=0", "warmup.sft={steps: 3, batch_size: 8, optim: {lr: 1e-2}}"];
    let matrices = ["memory.tensor_model_parallel_size=2"];
    let weights = ["memory.zero_stage=3", "memory.gradient_checkpointing=true"];
    let layers = ["memory.pipeline_model_parallel_size=2"];
    let cases: [Case<'_>; 3] =
        [("matrices", 2, &plain, &matrices), ("weights", 2, &plain, &weights), ("layers", 2, &plain, &layers)];
    learn_as_one_rank_and_repeat(folders.path(), &cases);
}
