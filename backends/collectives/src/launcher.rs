//! Detection of a launcher of MPI programs, and the world that this process belongs to.

use super::{Collective, CollectiveError, Result, Settings, Solo};
use std::sync::Arc;

/// Place of a process in the world of `mpirun` or `srun`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Who started it.
    pub by: &'static str,
    /// Processes that were started together.
    pub size: usize,
    /// Rank of this process.
    pub rank: usize,
    /// Its rank among those on this machine.
    pub local_rank: usize,
}

/// A launcher and its variables: size, rank, rank on the machine.
const LAUNCHERS: [(&str, [&str; 3]); 3] = [
    ("mpirun (Open MPI)", ["OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"]),
    ("mpirun (MPICH)", ["PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"]),
    ("srun", ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"]),
];

impl Launch {
    /// The launcher in this process' environment.
    pub fn from_environment() -> Option<Self> {
        Self::read(|name| std::env::var(name).ok())
    }

    fn read(variable: impl Fn(&str) -> Option<String>) -> Option<Self> {
        let number = |name: &str| variable(name)?.trim().parse::<usize>().ok();
        LAUNCHERS.iter().find_map(|&(by, [size, rank, local])| {
            Some(Self { by, size: number(size)?, rank: number(rank)?, local_rank: number(local).unwrap_or(0) })
        })
    }

    /// The error of a world of another size.
    #[cfg(any(test, feature = "mpi"))]
    fn other_size(self, world: usize) -> CollectiveError {
        let Self { by, size, .. } = self;
        CollectiveError::Transport(format!(
            "{by} started {size} processes, but the MPI library of this program sees a world of {world}: the program \
             was built for another MPI than the one that starts it. Build it with this mpirun's mpicc first in PATH \
             (or set MPICC), or start it with the mpirun of the MPI that it was built for"
        ))
    }
}

/// The world of this process: all processes that `mpirun` or `srun` started with it, or itself alone.
///
/// # Errors
/// If several processes were started and this build has no MPI, or that of another launcher.
pub fn launched_world(settings: Settings) -> Result<Arc<dyn Collective>> {
    match Launch::from_environment().filter(|launch| launch.size > 1) {
        None => Ok(Arc::new(Solo)),
        Some(launch) => world_of(launch, settings),
    }
}

#[cfg(feature = "mpi")]
fn world_of(launch: Launch, settings: Settings) -> Result<Arc<dyn Collective>> {
    let world = super::Mpi::world(settings)?;
    if world.size() == launch.size {
        return Ok(world);
    }
    let error = launch.other_size(world.size());
    world.abort(&error.to_string());
    Err(error)
}

#[cfg(not(feature = "mpi"))]
fn world_of(launch: Launch, _settings: Settings) -> Result<Arc<dyn Collective>> {
    let Launch { by, size, .. } = launch;
    Err(CollectiveError::Transport(format!(
        "{by} started {size} processes, but this build does not support MPI: each would train by itself. Build it with \
         `cargo build --release --features mpi`, which needs an MPI and libclang (on Debian: apt-get install \
         libopenmpi-dev openmpi-bin libclang-dev), or start one process"
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch(variables: &[(&str, &str)]) -> Option<Launch> {
        Launch::read(|name| {
            let variable = variables.iter().find(|(key, _)| *key == name);
            variable.map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn launchers_are_told_by_their_variables() {
        let open_mpi = launch(&[
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ]);
        let open_mpi = open_mpi.unwrap();
        assert_eq!((open_mpi.size, open_mpi.rank, open_mpi.local_rank), (4, 3, 1));
        let mpich = launch(&[("PMI_SIZE", "2"), ("PMI_RANK", "1")]).unwrap();
        assert_eq!((mpich.by, mpich.size, mpich.rank), ("mpirun (MPICH)", 2, 1));
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "5"), ("SLURM_LOCALID", "1")];
        assert_eq!(launch(&slurm).unwrap().local_rank, 1);
        // a batch script is not a step: its program is alone
        assert_eq!(launch(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0")]), None);
        assert_eq!(launch(&[]), None);
    }

    #[test]
    fn a_world_of_another_size_names_both_and_the_cure() {
        let message = launch(&[("PMI_SIZE", "2"), ("PMI_RANK", "1")]).unwrap().other_size(1).to_string();
        assert!(message.contains("started 2 processes"), "{message}");
        assert!(message.contains("a world of 1") && message.contains("mpicc"), "{message}");
    }
}
