//! Buffers of messages between devices.
//!
//! On the host, through which values pass, three times a unit's gradients in f32 while these are summed (the message,
//! what is sent of it, what is received, and a device's part of the sum), and three times its weights while these are
//! gathered (what is sent and received, and what is put together); on the device, where devices share matrices or
//! sequences, one d-wide activation of a micro-batch throughout.
//!
//! Over NCCL all on the device: twice a unit's gradients (the message and what is received) and three times a device's
//! part of their sum in f32; twice a unit's weights (what is received, and what is made of it); twice that d-wide
//! activation, and with matrices three times its part in f32. What lies on the host takes what it takes without NCCL,
//! and on the device what is sent and received.

use super::Parallel;
use crate::estimate::{F32, MemoryUsage, Sizes};
use firebrick_spec::{Category, Home};

impl Parallel {
    /// True if devices sum the gradients of a whole optimizer step at its end, in buffers that are counted: through the
    /// host those of whole gradients are not, since a plan is then one device's.
    pub(crate) fn reduces_at_end(&self) -> bool {
        self.replicas() > 1 && !self.reduces_each_pass() && (self.nccl || self.shares())
    }

    /// Bytes on the device of the communication between devices, for `tokens` of a micro-batch: what is sent; over NCCL
    /// also what comes and, where matrices are shared, what stands between that and its sum.
    pub(crate) fn buffers(&self, sizes: &Sizes, tokens: u64, hidden: u64) -> u64 {
        let numbers = self.between(tokens * hidden);
        let sent = sizes.width * numbers;
        match (self.tensor > 1, self.sequence > 1) {
            (false, false) => 0,
            _ if !self.nccl => sent,
            (true, _) => 2 * sent + sums_on_device(numbers, self.tensor),
            (false, true) => 2 * sent,
        }
    }

    /// Buffers while the replicas reduce-scatter `elements` gradients of a unit, which are stored at `home`.
    pub(crate) fn summing(&self, numbers: u64, home: Home) -> MemoryUsage {
        if self.replicas() == 1 {
            return MemoryUsage::default();
        }
        let numbers = self.replicated().gradients(numbers);
        let whole = F32 * numbers;
        let (device, host) = match (self.nccl, home) {
            (false, _) if !self.shares() => (0, 0),
            (false, _) => (0, 3 * whole),
            (true, home) => {
                let sums = sums_on_device(numbers, self.replicas());
                let staged = if home == Home::Host { 3 * whole } else { 0 };
                (2 * whole + sums, staged)
            }
        };
        MemoryUsage::default().on_device(Category::Communication, device).on_host(Category::Communication, host)
    }

    /// Bytes on the device while `bytes` on the host are gathered: the received values, and a device's share of them.
    /// Stages give each other their layers through the host alone.
    pub(crate) fn staged(&self, bytes: u64) -> u64 {
        let devices = self.replicas().max(self.tensor);
        if self.nccl && devices > 1 { bytes + bytes.div_ceil(devices) } else { 0 }
    }

    /// Buffers while the replicas gather `bytes` of sharded weights, which are stored at `home`.
    pub(crate) fn gathering(&self, bytes: u64, home: Home) -> MemoryUsage {
        if !self.shares() {
            return MemoryUsage::default();
        }
        let whole = self.replicated().weights(bytes);
        let (device, host) = match (self.nccl, home) {
            (false, _) => (0, 3 * whole),
            (true, Home::Host) => (self.staged(whole), 3 * whole),
            // what comes, and the weights that are made of it
            (true, Home::Device) => (2 * whole, 0),
        };
        MemoryUsage::default().on_device(Category::Communication, device).on_host(Category::Communication, host)
    }
}

/// Temporaries of a device's share of a sum over `devices` devices: a term and two sums, in f32.
fn sums_on_device(numbers: u64, devices: u64) -> u64 {
    3 * F32 * numbers.div_ceil(devices)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Zero;
    use firebrick_arch::Arch;
    use serde_json::{Value, json};
    use std::path::Path;

    /// Bytes of rows, of a sum and of a gather of a thousand numbers or bytes: on the device, and on the host.
    fn buffers(parallel: Parallel, home: Home) -> [[u64; 2]; 3] {
        let Value::Object(config) = json!({
            "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
            "num_attention_heads": 4
        }) else {
            unreachable!("an object")
        };
        let arch = Arch::from_config(&config, Path::new("test")).expect("an architecture");
        let sizes = Sizes::new(&arch, None);
        let of = |held: MemoryUsage| [held.device.total(), held.host.total()];
        [[parallel.buffers(&sizes, 1000, 128), 0], of(parallel.summing(1000, home)), of(parallel.gathering(1000, home))]
    }

    fn sharded(zero: Zero) -> Parallel {
        Parallel { data: 4, zero, ..Parallel::default() }
    }

    fn tensor(parallel: Parallel) -> Parallel {
        Parallel { tensor: 2, ..parallel }
    }

    fn over_nccl(parallel: Parallel) -> Parallel {
        Parallel { nccl: true, ..parallel }
    }

    const NONE: [u64; 2] = [0, 0];

    #[test]
    fn several_devices_hold_what_they_sum_or_gather_three_times_or_an_activation_besides() {
        for home in [Home::Device, Home::Host] {
            let buffers = |parallel| buffers(parallel, home);
            assert_eq!(buffers(Parallel::default()), [NONE; 3]);
            assert_eq!(buffers(sharded(Zero::Off)), [NONE; 3]);
            let staged = [NONE, [0, 12_000], [0, 3000]];
            assert_eq!(buffers(sharded(Zero::Stage1)), staged);
            assert_eq!(buffers(sharded(Zero::Stage3)), staged);
            let rows = [4 * 1000 * 128, 0];
            assert_eq!(buffers(tensor(Parallel::default())), [rows, NONE, NONE]);
            let sharded_matrices = tensor(sharded(Zero::Stage1));
            assert_eq!(buffers(sharded_matrices)[1..], [[0, 6000], [0, 1500]]);
        }
    }

    #[test]
    fn over_nccl_messages_are_on_the_device_and_pass_through_the_host_only_where_values_lie_there() {
        let on = |parallel, home| buffers(over_nccl(parallel), home);
        for home in [Home::Device, Home::Host] {
            assert_eq!(on(Parallel::default(), home), [NONE; 3]);
        }
        // a message of 4,000 bytes, what comes, and three shards of 250 numbers
        let summed = 2 * 4000 + 3 * 1000;
        let whole = on(sharded(Zero::Off), Home::Device);
        assert_eq!(whole, [NONE, [summed, 0], NONE]);
        let shared = sharded(Zero::Stage3);
        let resident = on(shared, Home::Device);
        assert_eq!(resident, [NONE, [summed, 0], [2000, 0]]);
        let streamed = on(shared, Home::Host);
        assert_eq!(streamed, [NONE, [summed, 12_000], [1250, 3000]]);
        // rows that are sent and come, and three halves of them
        let rows = 4 * 1000 * 128;
        let together = on(tensor(Parallel::default()), Home::Device);
        assert_eq!(together[0], [2 * rows + 3 * rows / 2, 0]);
    }
}
