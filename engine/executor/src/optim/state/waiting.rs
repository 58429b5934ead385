//! Location of a parameter's state between two updates, and its copies.

use super::master::Master;
use super::{ParamState, Stored};
use crate::optim::moments::DeviceMoment;
use burn::tensor::Device;
use firebrick_backends::accounts::{Accounts, Category, Home};
use firebrick_core::Result;
use std::sync::Arc;

impl ParamState {
    /// True if another state of the parameter is kept in the same places and in as many bits.
    pub fn is_placed_like(&self, other: &Self) -> bool {
        self.differs_in_waiting(other) && self.idle == other.idle
    }

    /// True if another state of the parameter differs in nothing but where it waits between updates.
    pub fn differs_in_waiting(&self, other: &Self) -> bool {
        (self.home, self.kind) == (other.home, other.kind)
    }

    /// Location between updates.
    pub fn idle_home(&self) -> Home {
        self.idle
    }

    /// Waits on the host from now on. It takes no memory of the device, so that it is a way out where that has none
    /// left; where a copy fails, everything is where it was.
    pub fn wait_on_host(&mut self, accounts: &Arc<Accounts>) -> Result<()> {
        self.park(accounts)?;
        if let Some((Master::Device(master), _)) = &self.master {
            let on_host = Master::Device(master.clone()).into_host()?;
            self.master = Some(Master::new(on_host, accounts));
        }
        self.idle = Home::Host;
        Ok(())
    }

    pub(super) fn keep(&mut self, slices: Vec<[DeviceMoment; 2]>, accounts: &Arc<Accounts>) {
        let moments = slices.iter().flatten();
        let parked =
            moments.clone().any(|m| matches!(m, DeviceMoment::ParkedFloat(_) | DeviceMoment::ParkedBlock8(..)));
        let home = if parked { Home::Host } else { Home::Device };
        let bytes = moments.map(DeviceMoment::bytes).sum();
        let hold = accounts.hold(Category::Moments, home, bytes);
        self.stored = Some((Stored::Device(slices), hold));
    }

    /// Device moments leave for the host until the next update.
    pub(super) fn park(&mut self, accounts: &Arc<Accounts>) -> Result<()> {
        let Some((Stored::Device(slices), _)) = &self.stored else {
            return Ok(());
        };
        let mut parked = Vec::with_capacity(slices.len());
        for [first, second] in slices {
            match (first.parked()?, second.parked()?) {
                (Some(first), Some(second)) => parked.push([first, second]),
                _ => return Ok(()),
            }
        }
        // the places on the device are given up first
        self.stored = None;
        self.keep(parked, accounts);
        Ok(())
    }

    /// Parked moments come back.
    pub(super) fn wake(&mut self, device: &Device, accounts: &Arc<Accounts>) {
        match self.stored.take() {
            Some((Stored::Device(slices), hold)) => {
                // given back first, so that a peak never counts moments twice
                drop(hold);
                let awake = slices.into_iter().map(|pair| pair.map(|m| m.wake(device)));
                self.keep(awake.collect(), accounts);
            }
            other => self.stored = other,
        }
    }
}
