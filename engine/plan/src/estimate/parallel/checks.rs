//! Degrees that a workload cannot be divided by.

use super::Parallel;
use crate::estimate::Workload;
use crate::{Error, Result, Zero};
use firebrick_arch::Arch;

impl Parallel {
    /// Refuses degrees that the workload cannot be divided by.
    ///
    /// # Errors
    /// `Error::Config` with the first degree that does not divide what it has to divide, or does not fit the cluster.
    pub fn check(&self, workload: &Workload) -> Result<()> {
        let bad = |what: String| Err(Error::Config(what));
        let arch = &workload.arch;
        let degrees =
            [("data", self.data), ("tensor", self.tensor), ("pipeline", self.pipeline), ("sequence", self.sequence)];
        if let Some((name, _)) = degrees.iter().find(|(_, n)| *n == 0) {
            return bad(format!("the {name}-parallel degree should be at least 1"));
        }
        let rollouts = workload.mini_rollouts();
        if self.data > rollouts {
            return bad(format!(
                "the data-parallel degree is {}; an optimizer step has {rollouts} sequences to distribute",
                self.data
            ));
        }
        if self.zero > Zero::Off && self.replicas() == 1 {
            return bad(
                "ZeRO shards state over data-parallel devices, and there is only one: the data-parallel degree should \
                 be at least 2, or the ZeRO stage 0"
                    .into(),
            );
        }
        let keys = arch.num_kv_heads as u64;
        if !keys.is_multiple_of(self.tensor) && !self.tensor.is_multiple_of(keys) {
            return bad(format!(
                "the tensor-parallel degree is {}; it should divide the model's {keys} key/value heads, or be a multiple of them",
                self.tensor
            ));
        }
        let degree = self.sequence.saturating_mul(self.tensor);
        if !(arch.num_heads as u64).is_multiple_of(degree) {
            return bad(format!(
                "the sequence-parallel degree times the tensor-parallel one is {degree}; it should divide the model's {} heads",
                arch.num_heads
            ));
        }
        if self.sequence > 1 && arch.delta_net.is_some() {
            return bad(format!(
                "the sequence-parallel degree is {}, but linear attention carries a state from token to token: a \
                 sequence cannot be sharded",
                self.sequence
            ));
        }
        if let Some(tensor) = self.rollout_tensor {
            let [heads, keys] = [arch.num_heads, arch.num_kv_heads].map(|n| n as u64);
            let divides = tensor > 0
                && self.devices().is_multiple_of(tensor)
                && heads.is_multiple_of(tensor)
                && (keys.is_multiple_of(tensor) || tensor.is_multiple_of(keys));
            if !divides {
                return bad(format!(
                    "the tensor-parallel degree of sampling is {tensor}; it should divide the {} devices and the model's {heads} heads, and \
                     its {keys} key/value heads or be a multiple of them",
                    self.devices(),
                ));
            }
        }
        self.check_critic(workload)?;
        self.check_cluster()?;
        self.check_stages("model", arch)?;
        workload.critic_arch().map_or(Ok(()), |critic| self.check_stages("critic", critic))
    }

    /// Refuses a degree of the critic's own that the devices, its heads or the work cannot be divided by.
    fn check_critic(&self, workload: &Workload) -> Result<()> {
        let (Some(sequence), Some(critic)) = (self.critic_sequence, workload.critic_arch()) else {
            return Ok(());
        };
        let refuse =
            |why: String| Err(Error::Config(format!("the critic's sequence-parallel degree is {sequence}; {why}")));
        let (replicas, rollouts) = (self.replicas(), workload.mini_rollouts());
        if sequence == 0 || !replicas.is_multiple_of(sequence) {
            return refuse(format!(
                "it should divide the {replicas} devices of the data- and sequence-parallel degrees"
            ));
        }
        if replicas / sequence > rollouts {
            return refuse(format!(
                "the {} groups of devices are more than the {rollouts} sequences of an optimizer step",
                replicas / sequence
            ));
        }
        if !(critic.num_heads as u64).is_multiple_of(sequence.saturating_mul(self.tensor)) {
            return refuse(format!(
                "times the tensor-parallel one it should divide the critic's {} heads",
                critic.num_heads
            ));
        }
        if sequence > 1 && critic.delta_net.is_some() {
            return refuse("linear attention carries a state from token to token: a sequence cannot be sharded".into());
        }
        Ok(())
    }

    /// Refuses more stages than a model has layers.
    fn check_stages(&self, name: &str, arch: &Arch) -> Result<()> {
        let layers = arch.num_layers as u64;
        if self.pipeline > layers {
            return Err(Error::Config(format!(
                "the pipeline-parallel degree is {}; the {name} has {layers} layers",
                self.pipeline
            )));
        }
        Ok(())
    }

    /// Refuses degrees that are not the devices of the cluster, and matrices that are shared between machines.
    fn check_cluster(&self) -> Result<()> {
        let Some(cluster) = self.cluster else {
            return Ok(());
        };
        let (nodes, each) = (cluster.nodes, cluster.devices_per_node);
        if self.devices() != cluster.devices() {
            return Err(Error::Config(format!(
                "the degrees make {} devices, and {nodes} machines of {each} have {}",
                self.devices(),
                cluster.devices()
            )));
        }
        let widest = self.tensor.max(self.rollout_tensor.unwrap_or(1));
        if !each.is_multiple_of(widest) {
            return Err(Error::Config(format!(
                "the tensor-parallel degree is {widest}; tensor-parallel devices are in one machine, so it should \
                 divide the {each} of each"
            )));
        }
        Ok(())
    }
}
