//! What executes guests. `auto` measures: /dev/kvm can be there, start guests, and yet be a thousand times slower than emulation
//! at page faults and flushes, as where a hypervisor under this one has no nested page tables.

use crate::arch::Arch;
use crate::boot::machine::{CPU_MODEL, Unfinished, VirtualMachine};
use crate::qemu::{self, Accel};
use anyhow::Result;
use clap::ValueEnum;
use hugemm_inspect::interrupt;
use hugemm_workloads::request::{Request, Trial};
use hugemm_workloads::size::Size;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What a trial does: under emulation several times the work of starting QEMU and booting the kernel, which is about the same
/// under both.
const TRIAL: Trial = Trial { pages: 16 << 10, rounds: 12 };

const MEMORY: Size = Size(128 << 20);

/// Its CPUs: flushes have somebody to reach.
const CPUS: u32 = 2;

/// The longest that emulation may take for it.
const EMULATED: Duration = Duration::from_secs(120);

/// What a user asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Choice {
    /// Translation in software: works everywhere, and only ratios and counts mean something.
    Tcg,
    /// The same by one thread, by a clock that an instruction advances by a nanosecond: ratios hold on a busy machine too,
    /// and caches cost nothing.
    Icount,
    /// The processor, through /dev/kvm.
    Kvm,
    /// kvm where a short trial of page faults and flushes ends sooner under it than under tcg, else tcg.
    Auto,
}

impl Choice {
    /// Whether a guest of this size can be started at all: asked before anything is built for it.
    ///
    /// # Errors
    /// Those of [`qemu::ready`].
    pub fn ready(self, arch: Arch, memory: Size) -> Result<()> {
        qemu::ready(arch, if self == Choice::Kvm { Accel::Kvm } else { Accel::Tcg }, memory)
    }

    /// What it is to be. For `auto` the reference kernel is booted twice, for seconds; if tcg is chosen, a line on standard
    /// error says why.
    ///
    /// # Errors
    /// The kernel's image is not to be had, or the user interrupts.
    pub fn decide(self, arch: Arch, image: impl FnOnce() -> Result<PathBuf>) -> Result<Accel> {
        let verdict = match self {
            Choice::Tcg => return Ok(Accel::Tcg),
            Choice::Icount => return Ok(Accel::Icount),
            Choice::Kvm => return Ok(Accel::Kvm),
            // Another architecture is always emulated.
            Choice::Auto if arch != Arch::NATIVE => return Ok(Accel::Tcg),
            Choice::Auto => match qemu::kvm_usable() {
                Ok(()) => {
                    let image = image()?;
                    judge(|accel, limit| trial(&image, arch, accel, limit))?
                }
                Err(error) => Verdict::Tcg(format!("{error:#}")),
            },
        };
        match verdict {
            Verdict::Kvm => Ok(Accel::Kvm),
            Verdict::Tcg(why) => {
                eprintln!("hugemm: tcg executes the guest: {why}");
                Ok(Accel::Tcg)
            }
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Kvm,
    /// And why.
    Tcg(String),
}

/// Compares by one trial each. Emulation is the bound: what has not ended by then is not worth waiting for. Where emulation cannot be
/// measured, as on a machine so busy that a guest seems to hang, it is chosen: what is wrong with it otherwise, the guest itself shows.
fn judge(mut trial: impl FnMut(Accel, Duration) -> Result<Duration>) -> Result<Verdict> {
    let emulated = trial(Accel::Tcg, EMULATED);
    // Who wants to stop wants no other guest.
    interrupt::check()?;
    let emulated = match emulated {
        Ok(time) => time,
        Err(error) => return Ok(Verdict::Tcg(format!("a trial that kvm would be measured by failed: {error:#}"))),
    };
    let measured = trial(Accel::Kvm, emulated);
    interrupt::check()?;
    let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
    Ok(match measured {
        Ok(time) if time <= emulated => Verdict::Kvm,
        Ok(time) => Verdict::Tcg(format!(
            "page faults and flushes that take {} under it take {} under kvm",
            seconds(emulated),
            seconds(time)
        )),
        Err(error) if error.is::<Unfinished>() => Verdict::Tcg(format!(
            "page faults and flushes that take {} under it were not done by then under kvm",
            seconds(emulated)
        )),
        Err(error) => Verdict::Tcg(format!("a trial under kvm failed: {error:#}")),
    })
}

/// From the start of QEMU to its end.
fn trial(image: &Path, arch: Arch, accel: Accel, limit: Duration) -> Result<Duration> {
    let machine =
        VirtualMachine { image, arch, accel, cpu_model: CPU_MODEL, cpus: CPUS, memory: MEMORY, timeout: limit };
    let started = Instant::now();
    machine.run(&Request::Trial(TRIAL), |_, _, _| {})?;
    Ok(started.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;
    use std::cell::RefCell;

    const TCG: Duration = Duration::from_millis(1500);

    /// What is judged of a machine whose kvm does this, and the limits that its trials were given.
    fn judged(kvm: impl Fn(Duration) -> Result<Duration>) -> (Result<Verdict>, Vec<(Accel, Duration)>) {
        let asked = RefCell::new(Vec::new());
        let verdict = judge(|accel, limit| {
            asked.borrow_mut().push((accel, limit));
            match accel {
                Accel::Tcg | Accel::Icount => Ok(TCG),
                Accel::Kvm => kvm(limit),
            }
        });
        (verdict, asked.into_inner())
    }

    fn why(verdict: Result<Verdict>) -> String {
        match verdict.expect("judged") {
            Verdict::Kvm => panic!("kvm was chosen"),
            Verdict::Tcg(why) => why,
        }
    }

    #[test]
    fn the_processor_is_chosen_where_it_is_faster() {
        let (verdict, asked) = judged(|_| Ok(TCG / 10));
        assert_eq!(verdict.expect("judged"), Verdict::Kvm);
        assert_eq!(asked, [(Accel::Tcg, EMULATED), (Accel::Kvm, TCG)], "what emulation took is the bound");
    }

    #[test]
    fn a_kvm_that_is_slower_than_emulation_is_not_waited_for() {
        let (verdict, _) = judged(|limit| {
            assert_eq!(limit, TCG);
            Err(Unfinished { after: limit, last_word: "nothing".to_owned() }.into())
        });
        assert_eq!(why(verdict), "page faults and flushes that take 1.5 s under it were not done by then under kvm");
        let (verdict, _) = judged(|limit| Ok(limit + Duration::from_millis(200)));
        assert_eq!(why(verdict), "page faults and flushes that take 1.5 s under it take 1.7 s under kvm");
    }

    #[test]
    fn a_kvm_that_breaks_is_not_used() {
        let (verdict, _) = judged(|_| Err(anyhow!("kvm does not work here (no such device)")));
        assert_eq!(why(verdict), "a trial under kvm failed: kvm does not work here (no such device)");
    }

    #[test]
    fn where_emulation_cannot_be_measured_it_is_chosen() {
        let verdict = judge(|accel, _| {
            assert_eq!(accel, Accel::Tcg);
            Err(anyhow!("the guest hangs"))
        });
        assert_eq!(why(verdict), "a trial that kvm would be measured by failed: the guest hangs");
    }
}
