//! Modules from a kernel's own package.

use crate::linux::image::LinuxImage;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

#[derive(Debug)]
pub struct Module {
    pub name: String,
    pub content: Vec<u8>,
}

/// These modules of an image and what they depend on, what is depended on first. What the package does not have as a module
/// is taken to be in the image.
pub fn of(image: &LinuxImage, wanted: &[&str]) -> Result<Vec<Module>> {
    let beside = image.file.parent().unwrap_or(Path::new("."));
    // Where the image lies in a package, and its modules: /boot and /lib/modules; or both in one place.
    let places = ["../lib/modules", "../usr/lib/modules"].map(|place| beside.join(place).join(&image.release));
    let Some(tree) = places.into_iter().chain([beside.to_owned()]).find(|place| place.join("kernel").is_dir()) else {
        bail!(
            "the modules of {0} are not beside {1}; unpack its whole package (dpkg-deb -x) and name the image in there",
            image.release,
            image.file.display()
        );
    };
    let mut files = Vec::new();
    collect(&tree.join("kernel"), &mut files)?;
    let mut modules = Vec::new();
    wanted.iter().try_for_each(|name| add(name, &files, &mut modules))?;
    Ok(modules)
}

fn add(name: &str, files: &[PathBuf], modules: &mut Vec<Module>) -> Result<()> {
    if modules.iter().any(|module| module.name == name) {
        return Ok(());
    }
    let Some(file) = files.iter().find(|file| module_name(file).is_some_and(|found| found == name)) else {
        return Ok(());
    };
    let content = read(file)?;
    for needed in depends(&content) {
        add(&needed, files, modules)?;
    }
    modules.push(Module { name: name.to_owned(), content });
    Ok(())
}

fn collect(directory: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(directory).with_context(|| format!("cannot read {}", directory.display()))?;
    for entry in entries {
        let path = entry?.path();
        if path.is_dir() { collect(&path, files)? } else { files.push(path) }
    }
    Ok(())
}

/// A module's name, in which `-` is `_`.
fn module_name(file: &Path) -> Option<String> {
    Some(file.file_name()?.to_str()?.split_once(".ko")?.0.replace('-', "_"))
}

fn read(file: &Path) -> Result<Vec<u8>> {
    let name = file.display();
    let unpack = match file.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        _ => return std::fs::read(file).with_context(|| format!("cannot read {name}")),
    };
    let output = Command::new(unpack).args(["-d", "-c"]).arg(file).output();
    let output = output.with_context(|| format!("cannot run {unpack}, which {name} is packed with; install it"))?;
    if !output.status.success() {
        bail!("{unpack} cannot unpack {name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(output.stdout)
}

/// What a module says it depends on: a text `depends=a,b` that ends in 0, in the section `.modinfo`.
fn depends(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|bytes| bytes == KEY) else { return Vec::new() };
    let text = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8_lossy(text)
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::Arch;

    #[test]
    fn what_is_depended_on_comes_first_and_once() {
        let root = std::env::temp_dir().join(format!("hugemm-modules-{}", std::process::id()));
        let kernel = root.join("lib/modules/6.1-x/kernel/drivers");
        std::fs::create_dir_all(&kernel).expect("a directory");
        for (name, needs) in [("a.ko", "b-c,d"), ("b-c.ko", "d"), ("d.ko", ""), ("other.ko", "a")] {
            std::fs::write(kernel.join(name), format!("\x7fELF\0depends={needs}\0name=x\0")).expect("a file");
        }
        let image = LinuxImage { file: root.join("boot/vmlinuz-6.1-x"), arch: Arch::X86, release: "6.1-x".to_owned() };
        std::fs::create_dir_all(root.join("boot")).expect("a directory");
        let names = |wanted: &[&str]| -> Vec<String> {
            of(&image, wanted).expect("modules").into_iter().map(|module| module.name).collect()
        };
        let found = names(&["a", "in_the_image", "d"]);
        let missing = LinuxImage { release: "6.2".to_owned(), ..image.clone() };
        let refused = of(&missing, &["a"]);
        std::fs::remove_dir_all(&root).expect("it was made above");
        assert_eq!(found, ["d", "b_c", "a"]);
        assert!(refused.expect_err("another kernel").to_string().contains("unpack its whole package"));
    }
}
