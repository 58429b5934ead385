use super::*;
use super::{devices, nvidia, programs, storage, system, vulkan};
use firebrick::backends::DeviceSpec;
use firebrick::backends::collective::NcclInstallation;
use firebrick::backends::device::DeviceInfo;
use firebrick::spec::Backend;

/// A machine that has nothing, in a folder of its own.
struct Fake {
    root: tempfile::TempDir,
    bin: tempfile::TempDir,
}

impl Fake {
    fn new() -> Self {
        Self { root: tempfile::tempdir().unwrap(), bin: tempfile::tempdir().unwrap() }
    }

    fn file(&self, path: &str, text: &str) -> &Self {
        let path = self.root.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self
    }

    /// A program that prints a line, and fails if it is empty.
    #[cfg(unix)]
    fn program(&self, name: &str, says: &str) -> &Self {
        use std::os::unix::fs::PermissionsExt;
        let path = self.bin.path().join(name);
        let ends = if says.is_empty() { "exit 1" } else { "exit 0" };
        std::fs::write(&path, format!("#!/bin/sh\necho '{says}'\n{ends}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        self
    }

    fn card(&self) -> &Self {
        self.file("/sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n");
        self.file("/sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    }

    fn machine(&self) -> Machine {
        Machine::below(self.root.path(), &[("PATH", self.bin.path())])
    }
}

/// The check has this status, says this, and is fixed by a command that holds this.
fn is(check: &Check, status: Status, found: &str, fix: Option<&str>) {
    assert_eq!(check.status, status, "{check:?}");
    assert!(check.found.contains(found), "{check:?}");
    match (fix, &check.fix) {
        (None, None) => {}
        (Some(wanted), Some(command)) => assert!(command.contains(wanted), "{check:?}"),
        _ => panic!("fixed by {fix:?}: {check:?}"),
    }
}

fn cpu(software: bool) -> BackendReport {
    BackendReport {
        backend: Backend::Cpu,
        built: true,
        devices: vec![DeviceInfo {
            device: DeviceSpec::CPU,
            name: "a processor".into(),
            software,
            integrated: false,
            memory_bytes: Some(1 << 30),
            largest_buffer: None,
            dtypes: vec!["f32"],
        }],
        note: None,
    }
}

#[test]
fn devices_are_listed_and_a_backend_that_is_not_built_names_its_command() {
    let without = BackendReport {
        backend: Backend::Vulkan,
        built: false,
        devices: Vec::new(),
        note: Some("not in this build".into()),
    };
    let empty =
        BackendReport { backend: Backend::Wgpu, built: true, note: Some("no device".into()), ..without.clone() };
    let findings = devices::checks(&[without.clone(), empty, cpu(false)]);
    is(&findings[0], Status::Missing, "not in this build", Some("vulkan"));
    is(&findings[1], Status::Missing, "no device", None);
    is(&findings[2], Status::Ok, "a processor, 1.00 GiB, f32", None);
    is(&findings[3], Status::Ok, "takes cpu", None);
    let software = devices::checks(&[cpu(true)]);
    is(&software[1], Status::Warning, "name cpu explicitly", Some("--device cpu"));
    let nothing = devices::checks(&[without]);
    is(&nothing[1], Status::Failed, "nothing can train", Some("cargo install"));
}

#[test]
fn a_build_with_a_feature_more_keeps_those_that_it_has() {
    let command = |features: &[&str]| programs::install_with(features.to_vec());
    let install = "cargo install --path . --locked";
    assert_eq!(command(&["wgpu", "cuda"]), install);
    assert_eq!(command(&["wgpu", "cuda", "vulkan", "mpi"]), format!("{install} --features vulkan,mpi"));
    assert_eq!(command(&["cuda"]), format!("{install} --no-default-features --features cuda"));
    assert_eq!(command(&[]), format!("{install} --no-default-features"));
}

#[test]
fn a_driver_is_wanted_where_there_is_a_card() {
    let fake = Fake::new();
    let driver = || nvidia::driver(&fake.machine());
    is(&driver(), Status::Ok, "no NVIDIA GPU", None);
    fake.card();
    is(&driver(), Status::Warning, "no driver", Some("install nvidia-driver"));
    let module = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC version: 12\n";
    fake.file("/proc/driver/nvidia/version", module);
    is(&driver(), Status::Warning, "libcuda.so.1 is not found", Some("--gpus"));
    fake.file("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "");
    is(&driver(), Status::Ok, "version 570.86.15", None);
    let open = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (x@y)\n";
    fake.file("/proc/driver/nvidia/version", open);
    is(&driver(), Status::Ok, "version 580.159.04", None);
    std::fs::remove_file(fake.root.path().join("proc/driver/nvidia/version")).unwrap();
    is(&driver(), Status::Ok, "libcuda.so.1", None);
}

#[test]
fn a_toolkit_is_wanted_where_there_is_a_card_with_all_that_kernels_need() {
    let fake = Fake::new();
    let toolkit = || nvidia::toolkit(&fake.machine());
    is(&toolkit(), Status::Ok, "no NVIDIA GPU", None);
    fake.card();
    is(&toolkit(), Status::Warning, "no CUDA toolkit found", Some("cuda"));
    fake.file("/usr/local/cuda/include/cuda_fp16.h", "");
    is(&toolkit(), Status::Warning, "mma.h not found", Some("cuda"));
    fake.file("/usr/local/cuda/include/mma.h", "");
    fake.file("/usr/local/cuda/include/crt/mma.h", "");
    is(&toolkit(), Status::Warning, "libnvrtc.so not found", Some("cuda"));
    fake.file("/usr/local/cuda/lib64/libnvrtc.so", "");
    is(&toolkit(), Status::Ok, "/usr/local/cuda", None);
}

#[test]
fn nccl_is_missing_where_there_is_a_card_and_says_its_version_and_file() {
    let fake = Fake::new();
    let nccl = |opened| nvidia::nccl(&fake.machine(), opened);
    is(&nccl(None), Status::Ok, "no NVIDIA GPU", None);
    fake.card();
    is(&nccl(Some(Err("cannot be opened".into()))), Status::Missing, "no libnccl.so.2", Some("libnccl2"));
    fake.file("/usr/lib/x86_64-linux-gnu/libnccl.so.2", "");
    is(&nccl(None), Status::Ok, "this build has no CUDA", None);
    is(&nccl(Some(Err("NCCL 2.10.3 is too old".into()))), Status::Warning, "2.10.3 is too old", Some("libnccl2"));
    let opened = |path: Option<&str>| NcclInstallation { path: path.map(Into::into), version: "2.21.5".into() };
    for path in [Some("/usr/lib/x86_64-linux-gnu/libnccl.so.2.21.5"), None] {
        let finding = nccl(Some(Ok(opened(path))));
        is(&finding, Status::Ok, "version 2.21.5 (", None);
        assert!(finding.found.contains("x86_64-linux-gnu/libnccl.so.2"), "{finding:?}");
    }
}

#[test]
fn vulkan_needs_a_loader_and_a_driver() {
    let fake = Fake::new();
    let loader = || vulkan::loader(&fake.machine());
    is(&loader(), Status::Missing, "libvulkan.so.1", Some("mesa-vulkan-drivers"));
    fake.file("/usr/lib64/libvulkan.so.1", "");
    is(&loader(), Status::Missing, "finds no driver", Some("mesa-vulkan-drivers"));
    fake.file("/usr/share/vulkan/icd.d/lvp_icd.json", "{}");
    is(&loader(), Status::Ok, "lvp_icd", None);
}

#[test]
fn limits_are_those_of_the_process() {
    let fake = Fake::new();
    is(&system::open_files(&fake.machine()), Status::Missing, "does not report", None);
    is(&system::locked_memory(&fake.machine()), Status::Missing, "does not report", None);
    let limits = |files: &str, locked: &str| {
        let text = format!(
            "Limit                     Soft Limit           Hard Limit           Units     \n\
             Max open files            {files}              1048576              files     \n\
             Max locked memory         {locked}             unlimited            bytes     \n"
        );
        fake.file("/proc/self/limits", &text);
        let machine = fake.machine();
        (system::open_files(&machine), system::locked_memory(&machine))
    };
    let (files, locked) = limits("256", "8388608");
    is(&files, Status::Warning, "at most 256", Some("ulimit -n"));
    is(&locked, Status::Ok, "8.00 MiB", None);
    fake.card();
    let (files, locked) = limits("1024", "8388608");
    is(&files, Status::Ok, "at most 1024", None);
    is(&locked, Status::Warning, "8.00 MiB", Some("ulimit -l unlimited"));
    let (files, locked) = limits("unlimited", "unlimited");
    is(&files, Status::Ok, "unlimited", None);
    is(&locked, Status::Ok, "unlimited", None);
}

#[test]
fn memory_is_what_the_system_and_the_control_group_leave() {
    let fake = Fake::new();
    let memory = || system::memory(&fake.machine());
    is(&memory(), Status::Missing, "does not report", None);
    fake.file("/proc/meminfo", "MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n");
    is(&memory(), Status::Ok, "8.00 GiB available of 16.0 GiB", None);
    fake.file("/sys/fs/cgroup/memory.max", "max\n");
    is(&memory(), Status::Ok, "8.00 GiB available", None);
    fake.file("/sys/fs/cgroup/memory.max", "2147483648\n");
    fake.file("/sys/fs/cgroup/memory.current", "1073741824\n");
    is(&memory(), Status::Warning, "1.00 GiB available", Some("--budget 1073741824"));
}

#[test]
fn a_run_folder_needs_space_and_leave_to_write() {
    let temp = tempfile::tempdir().unwrap();
    let output = temp.path().join("not/yet/there");
    let with = |free| storage::run_folder_with(&output, free);
    is(&with(Some(1 << 20)), Status::Failed, "1.00 MiB free", Some("output="));
    is(&with(Some(1 << 30)), Status::Warning, "1.00 GiB free", Some("output="));
    is(&with(Some(1 << 40)), Status::Ok, temp.path().to_str().unwrap(), None);
    is(&with(None), Status::Ok, temp.path().to_str().unwrap(), None);
    // nothing is left behind
    assert_eq!(std::fs::read_dir(temp.path()).unwrap().count(), 0);
    let file = temp.path().join("file");
    std::fs::write(&file, "").unwrap();
    let inside = storage::run_folder_with(&file.join("run"), Some(1 << 40));
    is(&inside, Status::Failed, "cannot be written to", Some("output="));
}

#[test]
fn a_cache_needs_a_folder_that_can_be_written_to() {
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("file");
    std::fs::write(&file, "").unwrap();
    let cache = |variables: &[(&str, &Path)]| storage::cache(&Machine::below(temp.path(), variables));
    is(&cache(&[]), Status::Warning, "HOME", Some("export"));
    is(&cache(&[("HOME", &file)]), Status::Warning, "cannot be written to", Some("export HF_HOME"));
    let finding = cache(&[("HF_HOME", temp.path())]);
    assert!(matches!(finding.status, Status::Ok | Status::Warning), "{finding:?}");
    assert!(finding.found.contains(temp.path().to_str().unwrap()), "{finding:?}");
}

#[test]
fn compiled_kernels_are_counted_in_bytes_and_need_a_folder_that_can_be_written_to() {
    is(&storage::kernel_cache(None), Status::Missing, "compiles its kernels again", Some("kernel-cache"));
    let temp = tempfile::tempdir().unwrap();
    let file = temp.path().join("firebrick.db");
    is(&storage::kernel_cache(Some(&temp.path().join("not/yet"))), Status::Ok, "0 B in", None);
    std::fs::write(&file, vec![0; 2048]).unwrap();
    is(&storage::kernel_cache(Some(temp.path())), Status::Ok, "2.00 KiB in", None);
    is(
        &storage::kernel_cache(Some(&file.join("kernels"))),
        Status::Warning,
        "cannot be written to",
        Some("XDG_CACHE_HOME"),
    );
}

#[cfg(unix)]
#[test]
fn programs_are_looked_for_in_path_and_asked_for_their_version() {
    let fake = Fake::new();
    let python = || programs::python(&fake.machine());
    let mpi = || programs::mpi(&fake.machine());
    is(&python(), Status::Missing, "no python3", Some("apt-get install python3"));
    is(&mpi(), Status::Missing, "one device needs none", Some("apt-get install openmpi-bin"));
    fake.program("pacman", "pacman");
    is(&mpi(), Status::Missing, "one device needs none", Some("pacman -S openmpi"));
    fake.program("python3", "");
    is(&python(), Status::Warning, "does not report", Some("pacman -S python"));
    fake.program("python3", "Python 3.6.9");
    is(&python(), Status::Warning, "3.6.9: older", Some("pacman -S python"));
    fake.program("python3", "Python 3.12.1");
    is(&python(), Status::Ok, "Python 3.12.1", None);
    fake.program("mpiexec", "");
    is(&mpi(), Status::Warning, "does not report", Some("openmpi"));
    fake.program("mpirun", "mpirun (Open MPI) 4.1.4");
    if cfg!(feature = "mpi") {
        is(&mpi(), Status::Ok, "Open MPI", None);
    } else {
        let (detail, fix) = ("built for one rank", Some("--locked"));
        is(&mpi(), Status::Missing, detail, fix);
        assert!(mpi().fix.is_some_and(|command| command.ends_with("mpi")));
    }
}
