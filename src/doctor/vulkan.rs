//! Vulkan: its loader, and the drivers that it finds.

use super::check::Check;
use super::machine::{Machine, Packages};

/// Mesa has drivers for AMD and Intel, and one in software; those of NVIDIA come with its driver.
const VULKAN: Packages = Packages {
    apt: "libvulkan1 mesa-vulkan-drivers",
    dnf: "vulkan-loader mesa-vulkan-drivers",
    pacman: "vulkan-icd-loader vulkan-swrast",
    brew: Some("molten-vk vulkan-loader"),
};

/// The loader, without which no GPU is found through wgpu and Vulkan.
pub fn loader(machine: &Machine) -> Check {
    const NAME: &str = "Vulkan loader";
    let Some(loader) = machine.library("libvulkan.so.1") else {
        return Check::missing(NAME, "libvulkan.so.1 not found: the devices wgpu and vulkan need it")
            .mended_by(machine.install(&VULKAN));
    };
    let named = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES", "VK_ADD_DRIVER_FILES"];
    let named = named.iter().any(|name| machine.variable(name).is_some());
    let folders = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d"];
    let mut drivers: Vec<String> = folders
        .iter()
        .flat_map(|folder| machine.entries(folder))
        .filter_map(|file| Some(file.file_stem()?.to_string_lossy().into_owned()))
        .collect();
    drivers.sort();
    if drivers.is_empty() && !named {
        return Check::missing(
            NAME,
            format!("{} finds no driver (no file in /usr/share/vulkan/icd.d)", loader.display()),
        )
        .mended_by(machine.install(&VULKAN));
    }
    let drivers = if named {
        "drivers named by environment variables".to_owned()
    } else {
        format!("drivers {}", drivers.join(" "))
    };
    Check::ok(NAME, format!("{}, {drivers}", loader.display()))
}
