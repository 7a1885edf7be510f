//! Names for the addresses in a report of the reference kernel, from the image's symbols.

use object::{Object, ObjectSymbol, SymbolKind};
use std::path::Path;

/// Where images are in virtual memory, at the lowest: arm64's.
const IMAGES: u64 = 0xffff_ffff_0000_0000;

/// Functions of an image by address.
#[derive(Debug, Default)]
pub struct Symbols(Vec<(u64, String)>);

impl Symbols {
    /// Reads an image's symbols. Without any, addresses stay numbers.
    pub fn read(image: &Path) -> Self {
        let Ok(bytes) = std::fs::read(image) else { return Symbols::default() };
        let Ok(file) = object::File::parse(&*bytes) else { return Symbols::default() };
        let code = file.symbols().filter(|symbol| matches!(symbol.kind(), SymbolKind::Text | SymbolKind::Label));
        let mut list: Vec<_> = code
            .filter_map(|symbol| {
                let name = rustc_demangle::demangle(symbol.name().ok()?);
                Some((symbol.address(), format!("{name:#}")))
            })
            // Those that begin with a dollar only tell code from data.
            .filter(|(address, name)| *address != 0 && !name.is_empty() && !name.starts_with('$'))
            .collect();
        list.sort();
        Symbols(list)
    }

    /// The function that an address is in, and how far in.
    fn name(&self, address: u64) -> Option<(&str, u64)> {
        let after = self.0.partition_point(|(start, _)| *start <= address);
        let (start, name) = self.0.get(after.checked_sub(1)?)?;
        Some((name, address - start))
    }

    /// A line with the function's name after each address of the image's part of memory.
    pub fn line(&self, text: &str) -> String {
        let word = |word: &str| {
            let address = word.strip_prefix("0x").and_then(|digits| u64::from_str_radix(digits, 16).ok());
            match address.filter(|address| *address >= IMAGES).and_then(|address| self.name(address)) {
                Some((name, offset)) => format!("{word} {name}+{offset:#x}"),
                None => word.to_owned(),
            }
        };
        text.split(' ').map(word).collect::<Vec<_>>().join(" ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_get_names() {
        let base = 0xffff_ffff_8010_0000_u64;
        let symbols = Symbols(vec![(base, "first".into()), (base + 0x100, "second".into())]);
        assert_eq!(symbols.line("  at 0xffffffff80100123"), "  at 0xffffffff80100123 second+0x23");
        assert_eq!(symbols.line("  at 0xffffffff80100000"), "  at 0xffffffff80100000 first+0x0");
        assert_eq!(symbols.line("read at 0xdeadbeef:"), "read at 0xdeadbeef:");
        assert_eq!(symbols.line("  at 0xffffffff80000000"), "  at 0xffffffff80000000");
    }

    #[test]
    fn no_image_no_names() {
        assert_eq!(Symbols::read(Path::new("/nonexistent")).line("at 0xffffffff80100123"), "at 0xffffffff80100123");
    }
}
