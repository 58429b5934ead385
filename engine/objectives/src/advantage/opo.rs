//! OPO: the reward baseline of least variance, if gradients grow with length (arXiv:2505.23585).

use super::groups::group_members;

/// `R − Σ_group |o| R / Σ_group |o|`. A group of one, or one without scored tokens, keeps its reward (verl).
pub fn opo(rewards: &[f64], groups: &[u64], lengths: &[usize]) -> Vec<f64> {
    let mut out = vec![0.0; rewards.len()];
    for members in group_members(groups) {
        let tokens: f64 = members.iter().map(|&i| lengths[i] as f64).sum();
        let weighted: f64 = members.iter().map(|&i| lengths[i] as f64 * rewards[i]).sum();
        let baseline = match members.len() {
            1 => 0.0,
            _ if tokens == 0.0 => 0.0,
            _ => weighted / tokens,
        };
        for &i in &members {
            out[i] = rewards[i] - baseline;
        }
    }
    out
}
