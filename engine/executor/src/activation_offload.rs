//! Inputs that segments keep for their second run: a stack, whose lower part may wait on the host.

use super::runtime::Runtime;
use burn::tensor::Tensor;
use firebrick_backends::accounts::{Accounts, Category, Home, MemoryGuard};
use firebrick_backends::transfer::{Download, HostTensor, Pending, Upload};
use firebrick_core::Result;
use firebrick_plan::Role;
use std::collections::VecDeque;
use std::sync::Arc;

type OnDevice = (Tensor<2>, MemoryGuard);
type OnHost = (HostTensor, MemoryGuard);

/// Inputs that are copied together, first pushed first.
enum Group {
    Leaving(Pending<Vec<OnHost>>),
    Away(Vec<OnHost>),
    /// On its way to the device.
    Back(Upload, Vec<MemoryGuard>),
}

/// Inputs that the forward pass pushes and the backward pass pops in reverse.
pub(super) struct ActivationStack<'r> {
    runtime: &'r Runtime,
    accounts: Arc<Accounts>,
    prefetch: usize,
    group: usize,
    /// Inputs that stay on the device, and those of a group that is not yet full.
    here: Vec<OnDevice>,
    open: Vec<OnDevice>,
    groups: VecDeque<Group>,
    /// Inputs of the group that is being popped.
    back: Vec<OnDevice>,
}

impl<'r> ActivationStack<'r> {
    /// A stack of inputs of one model, in groups of `group`.
    pub fn new(runtime: &'r Runtime, model: Role, prefetch: usize, group: usize) -> Self {
        Self {
            runtime,
            accounts: runtime.accounts.for_model(model),
            prefetch,
            group,
            here: Vec::new(),
            open: Vec::new(),
            groups: VecDeque::new(),
            back: Vec::new(),
        }
    }

    pub fn push(&mut self, input: Tensor<2>, home: Home) -> Result<()> {
        let kept = self.on_device(input);
        match home {
            Home::Device => self.here.push(kept),
            Home::Host => {
                self.open.push(kept);
                if self.open.len() == self.group {
                    self.send()?;
                }
            }
        }
        Ok(())
    }

    fn on_device(&self, input: Tensor<2>) -> OnDevice {
        let hold = hold(&self.accounts, Home::Device, bytes(&input));
        (input, hold)
    }

    /// Sends the open group away, once no more than `prefetch` others are on their way.
    fn send(&mut self) -> Result<()> {
        let group: Vec<(Download, MemoryGuard)> = std::mem::take(&mut self.open)
            .into_iter()
            .map(|(input, hold)| (self.runtime.copier.download(input), hold))
            .collect();
        let accounts = Arc::clone(&self.accounts);
        let leaving = self.runtime.copier.run(move || {
            group
                .into_iter()
                .map(|(input, here)| {
                    let host = input.finish_matrix()?;
                    drop(here);
                    let hold = hold(&accounts, Home::Host, host.bytes());
                    Ok((host, hold))
                })
                .collect()
        });
        self.groups.push_back(Group::Leaving(leaving));
        let arrived = self.groups.len().saturating_sub(self.prefetch);
        // earlier ones have landed already: only the newest of these can still be leaving
        for group in self.groups.iter_mut().take(arrived).rev() {
            if !land(group)? {
                break;
            }
        }
        Ok(())
    }

    /// The input pushed last, on the device again. `home` is the one it was pushed with.
    pub fn pop(&mut self, home: Home) -> Result<Tensor<2>> {
        let popped = match home {
            Home::Device => self.here.pop(),
            Home::Host => {
                if self.open.is_empty() && self.back.is_empty() {
                    self.bring_back()?;
                }
                // the open group is newer than any that left
                self.open.pop().or_else(|| self.back.pop())
            }
        };
        let Some((input, _hold)) = popped else { unreachable!("as many inputs are popped as were pushed") };
        Ok(input)
    }

    /// Has the device wait for the newest group, and begins the return of those before it. Copies that were begun at
    /// the last call run beside the kernels that were asked for since.
    fn bring_back(&mut self) -> Result<()> {
        let newest = self.groups.len() - 1;
        self.start_return(newest)?;
        self.back = match self.groups.pop_back() {
            Some(Group::Back(upload, holds)) => upload.finish().into_iter().zip(holds).collect(),
            _ => unreachable!("its return was just started"),
        };
        self.start_copies();
        for index in (newest.saturating_sub(self.prefetch)..newest).rev() {
            self.start_return(index)?;
        }
        Ok(())
    }

    /// Asks for the copies of returns that were begun. Called before others are begun (weights that are fetched):
    /// behind their beginning the copies would wait for all kernels until then.
    pub fn start_copies(&mut self) {
        for group in &mut self.groups {
            if let Group::Back(upload, _) = group {
                upload.start();
            }
        }
    }

    fn start_return(&mut self, index: usize) -> Result<()> {
        land(&mut self.groups[index])?;
        let group = &mut self.groups[index];
        if let Group::Away(inputs) = group {
            let (runtime, accounts) = (self.runtime, &self.accounts);
            let (mut hosts, mut holds) = (Vec::new(), Vec::new());
            for (host, there) in std::mem::take(inputs) {
                holds.push(hold(accounts, Home::Device, host.bytes()));
                drop(there);
                hosts.push(host);
            }
            *group = Group::Back(runtime.copier.upload(hosts, runtime.device()), holds);
        }
        Ok(())
    }
}

/// Waits for a leaving group; false where it had landed before.
fn land(group: &mut Group) -> Result<bool> {
    if !matches!(group, Group::Leaving(_)) {
        return Ok(false);
    }
    if let Group::Leaving(leaving) = std::mem::replace(group, Group::Away(Vec::new())) {
        *group = Group::Away(leaving.wait()?);
    }
    Ok(true)
}

fn hold(accounts: &Arc<Accounts>, home: Home, bytes: usize) -> MemoryGuard {
    accounts.hold(Category::KeptInputs, home, bytes)
}

fn bytes(tensor: &Tensor<2>) -> usize {
    let [rows, cols] = tensor.dims();
    rows * cols * tensor.dtype().size()
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    fn number(value: f32, device: &Device) -> Tensor<2> {
        Tensor::from_data([[value, value]], device)
    }

    #[test]
    fn inputs_come_back_in_reverse_however_they_travelled() {
        let device = Device::flex();
        for prefetch in 0..4 {
            for group in 1..5 {
                let runtime = Runtime::new(&device).with_prefetch(prefetch);
                let mut kept = ActivationStack::new(&runtime, Role::Policy, prefetch, group);
                let home = |i: usize| {
                    if i.is_multiple_of(3) { Home::Device } else { Home::Host }
                };
                for i in 0..11 {
                    kept.push(number(i as f32, &device), home(i)).unwrap();
                }
                for i in (0..11).rev() {
                    let values: Vec<f32> = kept.pop(home(i)).unwrap().try_into_vec_as().unwrap();
                    assert_eq!(values, [i as f32; 2], "prefetch {prefetch}, group {group}");
                }
            }
        }
    }

    #[test]
    fn the_device_holds_only_what_is_under_way() {
        let device = Device::flex();
        for (prefetch, most) in [(0, 1), (1, 2), (2, 3)] {
            let runtime = Runtime::new(&device).with_prefetch(prefetch);
            let mut kept = ActivationStack::new(&runtime, Role::Policy, prefetch, 1);
            for i in 0..20 {
                kept.push(number(i as f32, &device), Home::Host).unwrap();
            }
            for _ in 0..20 {
                kept.pop(Home::Host).unwrap();
            }
            let balance = runtime.accounts.balance(Category::KeptInputs, Home::Device);
            assert!(balance.peak_bytes <= most * 8, "{prefetch}: {balance:?}");
            assert_eq!(balance.bytes, 0);
        }
    }
}
