//! What errors say: each something of its own, with the numbers that it is about.

use hugemm_base::Pfn;
use hugemm_frames::{AllocContigError, AllocError, FramesConfigError, RefError};

#[test]
fn errors_are_told_apart() {
    use FramesConfigError::{Empty, Memory, Overlap, TooLarge};
    let allocating = [AllocError::OutOfMemory, AllocError::NoSuchNode, AllocError::WouldWait].map(|e| e.to_string());
    let counting = [RefError::NotManaged, RefError::NotCounted, RefError::Saturated].map(|e| e.to_string());
    let in_use = AllocContigError::InUse(Pfn::new(0x2a));
    let contiguous = [AllocContigError::NotManaged, AllocContigError::Misaligned, AllocContigError::Contended, in_use];
    let contiguous = contiguous.map(|e| e.to_string());
    let (overlap, memory) = (Overlap(Pfn::new(0x1b)), Memory { bytes: 12345, align: 64 });
    let configuring = [Empty, TooLarge, overlap, memory].map(|e| e.to_string());
    assert!(contiguous[3].contains("0x2a") && configuring[2].contains("0x1b"));
    assert!(configuring[3].contains("12345") && configuring[3].contains("64"));
    let mut said = [&allocating[..], &counting, &contiguous, &configuring].concat();
    let count = said.len();
    said.sort();
    said.dedup();
    assert!(said.len() == count && said.iter().all(|said| !said.is_empty()));
}
