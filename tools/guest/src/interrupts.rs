//! Inter-processor interrupts, as Linux counts them.

use anyhow::{Context, Result};

/// Sums over all CPUs of the lines of `/proc/interrupts` in which TLB shootdowns can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interrupts {
    /// Function calls: `flush_tlb_all` and kernel ranges arrive as these.
    pub function_calls: u64,
    /// TLB shootdowns of user addresses.
    pub tlb: u64,
}

impl Interrupts {
    pub fn read() -> Result<Self> {
        Ok(Self::parse(&std::fs::read_to_string("/proc/interrupts").context("cannot read /proc/interrupts")?))
    }

    fn parse(text: &str) -> Self {
        // By what they are, since each architecture numbers or names them in its own way.
        let sum = |what: &str| {
            let line = text.lines().find(|line| line.trim_end().ends_with(what)).unwrap_or("");
            line.split_whitespace().skip(1).map_while(|word| word.parse::<u64>().ok()).sum()
        };
        Interrupts { function_calls: sum("Function call interrupts"), tlb: sum("TLB shootdowns") }
    }

    /// What was counted since `earlier`.
    pub fn since(self, earlier: Interrupts) -> Interrupts {
        Interrupts { function_calls: self.function_calls - earlier.function_calls, tlb: self.tlb - earlier.tlb }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_of_all_cpus_are_summed() {
        let text = "           CPU0       CPU1       \n\
                    LOC:       9000       8000   Local timer interrupts\n\
                    CAL:        170         30   Function call interrupts\n\
                    TLB:          5          7   TLB shootdowns\n";
        assert_eq!(Interrupts::parse(text), Interrupts { function_calls: 200, tlb: 12 });
        let text = "           CPU0       CPU1\n\
                    \x20IPI0:         2          0       Rescheduling interrupts\n\
                    \x20IPI1:         4          3       Function call interrupts\n";
        assert_eq!(Interrupts::parse(text), Interrupts { function_calls: 7, tlb: 0 });
        assert_eq!(Interrupts::parse(""), Interrupts { function_calls: 0, tlb: 0 });
    }
}
