//! Degrees that a workload cannot be divided by.

use super::Parallel;
use crate::estimate::Workload;
use crate::{Error, Result, Zero};
use firebrick_arch::Arch;

/// Refuses degrees of which a condition does not hold.
fn require(holds: bool, otherwise: impl FnOnce() -> String) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::Config(otherwise())) }
}

impl Parallel {
    /// Refuses degrees that the workload cannot be divided by.
    ///
    /// # Errors
    /// `Error::Config` with the first degree that does not divide what it has to divide, or does not fit the cluster.
    pub fn check(&self, workload: &Workload) -> Result<()> {
        let Self { data, tensor, pipeline, sequence, .. } = *self;
        for (name, degree) in [("data", data), ("tensor", tensor), ("pipeline", pipeline), ("sequence", sequence)] {
            require(degree > 0, || format!("the {name}-parallel degree should be at least 1"))?;
        }
        let (arch, rollouts) = (&workload.arch, workload.mini_rollouts());
        require(data <= rollouts, || {
            format!("the data-parallel degree is {data}; an optimizer step has {rollouts} sequences to distribute")
        })?;
        require(self.zero == Zero::Off || self.replicas() > 1, || {
            "ZeRO shards state over data-parallel devices, and there is only one: the data-parallel degree should be at \
             least 2, or the ZeRO stage 0"
                .into()
        })?;
        let [heads, keys] = [arch.num_heads, arch.num_kv_heads].map(|n| n as u64);
        let divides_keys = |degree: u64| keys.is_multiple_of(degree) || degree.is_multiple_of(keys);
        require(divides_keys(tensor), || {
            format!(
                "the tensor-parallel degree is {tensor}; it should divide the model's {keys} key/value heads, or be a multiple of them"
            )
        })?;
        let degree = sequence.saturating_mul(tensor);
        require(heads.is_multiple_of(degree), || {
            format!(
                "the sequence-parallel degree times the tensor-parallel one is {degree}; it should divide the model's {heads} heads"
            )
        })?;
        require(sequence == 1 || arch.delta_net.is_none(), || {
            format!(
                "the sequence-parallel degree is {sequence}, but linear attention carries a state from token to token: a \
                 sequence cannot be sharded"
            )
        })?;
        if let Some(tensor) = self.rollout_tensor {
            let devices = self.devices();
            let divides =
                tensor > 0 && devices.is_multiple_of(tensor) && heads.is_multiple_of(tensor) && divides_keys(tensor);
            require(divides, || {
                format!(
                    "the tensor-parallel degree of sampling is {tensor}; it should divide the {devices} devices and the model's {heads} \
                     heads, and its {keys} key/value heads or be a multiple of them"
                )
            })?;
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
        let (replicas, rollouts, heads) = (self.replicas(), workload.mini_rollouts(), critic.num_heads);
        let groups = replicas / sequence.max(1);
        let why = if sequence == 0 || !replicas.is_multiple_of(sequence) {
            format!("it should divide the {replicas} devices of the data- and sequence-parallel degrees")
        } else if groups > rollouts {
            format!("the {groups} groups of devices are more than the {rollouts} sequences of an optimizer step")
        } else if !(heads as u64).is_multiple_of(sequence.saturating_mul(self.tensor)) {
            format!("times the tensor-parallel one it should divide the critic's {heads} heads")
        } else if sequence > 1 && critic.delta_net.is_some() {
            "linear attention carries a state from token to token: a sequence cannot be sharded".into()
        } else {
            return Ok(());
        };
        Err(Error::Config(format!("the critic's sequence-parallel degree is {sequence}; {why}")))
    }

    /// Refuses more stages than a model has layers.
    fn check_stages(&self, name: &str, arch: &Arch) -> Result<()> {
        let (stages, layers) = (self.pipeline, arch.num_layers as u64);
        require(stages <= layers, || {
            format!("the pipeline-parallel degree is {stages}; the {name} has {layers} layers")
        })
    }

    /// Refuses degrees that are not the devices of the cluster, and matrices that are shared between machines.
    fn check_cluster(&self) -> Result<()> {
        let Some(cluster) = self.cluster else {
            return Ok(());
        };
        let (nodes, each, devices) = (cluster.nodes, cluster.devices_per_node, self.devices());
        require(devices == cluster.devices(), || {
            let there = cluster.devices();
            format!("the degrees make {devices} devices, and {nodes} machines of {each} have {there}")
        })?;
        let widest = self.tensor.max(self.rollout_tensor.unwrap_or(1));
        require(each.is_multiple_of(widest), || {
            format!(
                "the tensor-parallel degree is {widest}; tensor-parallel devices are in one machine, so it should divide \
                 the {each} of each"
            )
        })
    }
}
