//! A pool is put back after its program was killed, too: by a shell that outlives it and waits for the end of a pipe.

use super::files::PoolFiles;
use std::io::{PipeWriter, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

/// Reads what has been added for certain, what is being added, and what the pool had before that; the last line counts. Uses what a
/// shell has in itself, but for the lock, which is good manners.
const SCRIPT: &str = r#"
trap '' HUP INT TERM
added=0 step=0 before=0
while read -r a s b; do added=$a step=$s before=$b; done
[ "$added" = 0 ] && [ "$step" = 0 ] && exit
exec 9<"$1/nr_hugepages" && flock -w 5 9
read -r now <"$1/nr_hugepages" || exit
surplus=0
read -r surplus <"$1/surplus_hugepages"
now=$((now - surplus))
given=$((now - before))
[ "$given" -lt 0 ] && given=0
[ "$given" -gt "$step" ] && given=$step
to=$((now - added - given))
[ "$to" -lt 0 ] && to=0
echo "$to" >"$1/nr_hugepages"
"#;

/// The shell, and the pipe that ends when this process does.
#[derive(Debug)]
pub(super) struct Survivor {
    shell: Child,
    tell: Option<PipeWriter>,
}

impl Survivor {
    /// `None` where there is no shell: then a program that is killed leaves the pool as it is.
    pub(super) fn start(files: &PoolFiles) -> Option<Self> {
        let (hear, tell) = std::io::pipe().ok()?;
        let mut shell = Command::new("/bin/sh");
        shell.arg("-c").arg(SCRIPT).arg("hugemm-pool").arg(&files.directory).current_dir("/");
        // A group of its own: whoever ends this program by its group, as a terminal does, does not end what puts back.
        shell.process_group(0).stdin(hear).stdout(Stdio::null()).stderr(Stdio::null());
        Some(Survivor { shell: shell.spawn().ok()?, tell: Some(tell) })
    }

    /// What is to be taken away again if this process ends now.
    pub(super) fn tell(&mut self, added: u64, step: u64, before: u64) {
        if let Some(tell) = &mut self.tell {
            // A shell that has been killed puts nothing back.
            let _ = writeln!(tell, "{added} {step} {before}");
        }
    }
}

impl Drop for Survivor {
    fn drop(&mut self) {
        drop(self.tell.take());
        let _ = self.shell.wait();
    }
}
