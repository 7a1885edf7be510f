//! What a stock Linux guest boots from: the kernel image that the user names, and an initial file system with one program.

use crate::arch::Arch;
use crate::linux::modules::Module;
use anyhow::{Context, Result, bail};
use cpio::newc::{Builder, ModeFileType, trailer};
use std::fs::File;
use std::io::{BufWriter, Read, Write};
use std::path::{Path, PathBuf};

/// Where the x86 boot protocol has its magic number, the pointer to the version's text, and the first sector's mark
/// (Linux, Documentation/arch/x86/boot.rst).
const BOOT_FLAG: usize = 0x1fe;
const HEADER: usize = 0x202;
const VERSION: usize = 0x20e;

/// As much of an x86 image as the version's text can be in.
const HEAD_BYTES: u64 = 0x200 + (1 << 16) + 256;

/// Where an arm64 image that is not compressed has its magic number (Linux, Documentation/arch/arm64/booting.rst).
const ARM64: usize = 0x38;

/// What is in every kernel, before its release.
const BANNER: &[u8] = b"Linux version ";

#[derive(Clone, Debug)]
pub struct LinuxImage {
    pub file: PathBuf,
    pub arch: Arch,
    /// What the image says it is, up to the first blank: `6.12.107-cloud-amd64`.
    pub release: String,
}

impl LinuxImage {
    pub fn open(file: &Path) -> Result<Self> {
        let name = file.display();
        let image = File::open(file).with_context(|| format!("cannot read {name}"))?;
        let mut head = Vec::new();
        image.take(HEAD_BYTES).read_to_end(&mut head).with_context(|| format!("cannot read {name}"))?;
        let (arch, offset) = match version_offset(&head) {
            Some(offset) => (Arch::X86, offset),
            None if head.get(ARM64..ARM64 + 4) == Some(b"ARMd") => {
                head = std::fs::read(file).with_context(|| format!("cannot read {name}"))?;
                let banner = head.windows(BANNER.len()).position(|bytes| bytes == BANNER);
                (Arch::Arm64, banner.map_or(head.len(), |at| at + BANNER.len()))
            }
            None => bail!(
                "{name} is no bootable x86-64 or arm64 kernel image; give a distribution's vmlinuz (a bzImage, or an Image \
                 that is not compressed)"
            ),
        };
        let text = head.get(offset..).unwrap_or_default();
        let release = text.split(|byte| *byte == 0 || *byte == b' ').next().unwrap_or_default();
        let release = String::from_utf8_lossy(release).into_owned();
        let release = if release.is_empty() { name.to_string() } else { release };
        Ok(LinuxImage { file: file.to_owned(), arch, release })
    }

    pub fn common_arch(images: &[LinuxImage]) -> Result<Arch> {
        let arch = images.first().map_or(Arch::NATIVE, |image| image.arch);
        match images.iter().find(|image| image.arch != arch) {
            Some(other) => {
                bail!("{} and {} are of two architectures; run the command for each", images[0].release, other.release)
            }
            None => Ok(arch),
        }
    }
}

/// Where the version's text begins, if these are the first sectors of a bzImage.
fn version_offset(sectors: &[u8]) -> Option<usize> {
    let is_image =
        sectors.get(BOOT_FLAG..BOOT_FLAG + 2)? == [0x55, 0xaa] && sectors.get(HEADER..HEADER + 4)? == b"HdrS";
    let pointer = sectors.get(VERSION..VERSION + 2)?;
    is_image.then(|| usize::from(u16::from_le_bytes([pointer[0], pointer[1]])) + 0x200)
}

/// An initial file system that consists of the program `init`, a console, and modules; removed on drop.
#[derive(Debug)]
pub struct Initramfs(PathBuf);

impl Initramfs {
    /// Writes one, of a number that no other has, to the system's directory for temporary files. The program is to insert the
    /// modules in the order of their files' names.
    pub fn new(number: usize, init: &Path, modules: &[Module]) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("hugemm-initramfs-{}-{number}.cpio", std::process::id()));
        let initramfs = Initramfs(path.clone());
        let program = std::fs::read(init).with_context(|| format!("cannot read {}", init.display()))?;
        write(&path, &program, modules).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(initramfs)
    }

    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Initramfs {
    fn drop(&mut self) {
        // If it was never written there is nothing to remove.
        let _ = std::fs::remove_file(&self.0);
    }
}

fn write(path: &Path, program: &[u8], modules: &[Module]) -> Result<()> {
    let mut out = BufWriter::new(File::create(path)?);
    let entry = |name: &str, inode: u32, kind, rights: u32| {
        Builder::new(name).ino(inode).nlink(1).mode(rights).set_mode_file_type(kind)
    };
    for (name, inode) in [("dev", 1), ("proc", 2), ("sys", 3), ("modules", 6)] {
        entry(name, inode, ModeFileType::Directory, 0o755).write(&mut out, 0).finish()?;
    }
    // Without it the kernel gives its first process no standard output.
    entry("dev/console", 4, ModeFileType::Char, 0o600).rdev_major(5).rdev_minor(1).write(&mut out, 0).finish()?;
    let size = u32::try_from(program.len()).context("the program is larger than the format allows")?;
    let mut file = entry("init", 5, ModeFileType::Regular, 0o755).write(&mut out, size);
    file.write_all(program)?;
    file.finish()?;
    for (index, module) in (0..).zip(modules) {
        let size = u32::try_from(module.content.len()).context("a module is larger than the format allows")?;
        let name = format!("modules/{index:02}-{}.ko", module.name);
        let mut file = entry(&name, 7 + index, ModeFileType::Regular, 0o644).write(&mut out, size);
        file.write_all(&module.content)?;
        file.finish()?;
    }
    trailer(&mut out)?;
    out.flush()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Vec<u8> {
        let mut sectors = vec![0; 0x400];
        sectors[BOOT_FLAG..BOOT_FLAG + 2].copy_from_slice(&[0x55, 0xaa]);
        sectors[HEADER..HEADER + 4].copy_from_slice(b"HdrS");
        sectors[VERSION..VERSION + 2].copy_from_slice(&0x100_u16.to_le_bytes());
        sectors[0x300..0x30c].copy_from_slice(b"6.1.0-x (a@b");
        sectors
    }

    #[test]
    fn an_image_says_its_architecture_and_release() {
        let directory = std::env::temp_dir().join(format!("hugemm-images-{}", std::process::id()));
        std::fs::create_dir_all(&directory).expect("a directory");
        let mut arm = vec![0; 0x1000];
        arm[ARM64..ARM64 + 4].copy_from_slice(b"ARMd");
        arm[0xf00..0xf16].copy_from_slice(b"Linux version 6.1.0-y ");
        let open = |name: &str, bytes: &[u8]| {
            std::fs::write(directory.join(name), bytes).expect("a file");
            LinuxImage::open(&directory.join(name))
        };
        let (x86, arm) = (open("x86", &image()), open("arm", &arm));
        let neither = open("neither", &[0; 0x1000]);
        std::fs::remove_dir_all(&directory).expect("it was made above");
        let images = [x86.expect("an image"), arm.expect("an image")];
        let said = images.each_ref().map(|image| (image.arch, image.release.as_str()));
        assert_eq!(said, [(Arch::X86, "6.1.0-x"), (Arch::Arm64, "6.1.0-y")]);
        assert_eq!(LinuxImage::common_arch(&images[1..]).expect("one"), Arch::Arm64);
        let mixed = LinuxImage::common_arch(&images).expect_err("two").to_string();
        assert!(mixed.contains("6.1.0-x and 6.1.0-y are of two architectures"), "{mixed}");
        assert!(neither.expect_err("no image").to_string().contains("x86-64 or arm64"));
    }

    #[test]
    fn only_a_kernel_image_is_taken_for_one() {
        assert_eq!(version_offset(&image()), Some(0x300));
        for spoiled in [BOOT_FLAG, HEADER] {
            let mut sectors = image();
            sectors[spoiled] = 0;
            assert_eq!(version_offset(&sectors), None);
        }
        assert_eq!(version_offset(b"\x7fELF"), None);
    }
}
