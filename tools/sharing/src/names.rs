//! What a word is called: the path of fields that leads to it from the roots, by the types in the debug information and the pointers in
//! the traced program's memory. So no crate says what it consists of, and none has anything for this.

use anyhow::{Context, Result, anyhow};
use gimli::{AttributeValue, DwAt, EndianSlice, LittleEndian, UnitOffset, constants as dw};
use object::{Object, ObjectSection};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;

type Slice = EndianSlice<'static, LittleEndian>;
type Unit = gimli::Unit<Slice>;
type Entry<'u> = gimli::DebuggingInformationEntry<'u, 'u, Slice>;

/// A type: its unit, and where it is there.
type TypeId = (usize, UnitOffset);

/// What is known of a type.
#[derive(Debug, Default)]
struct Type {
    name: String,
    size: u64,
    /// What a pointer points to.
    pointee: Option<TypeId>,
    /// An array's elements.
    element: Option<(TypeId, u64)>,
    /// Fields, where they are, and what they are.
    fields: Vec<(String, u64, TypeId)>,
}

/// Elements of longer slices are not told apart, nor followed.
const SHORT: u64 = 64;

/// Types of the traced program.
pub(crate) struct Types {
    dwarf: gimli::Dwarf<Slice>,
    units: Vec<Unit>,
    known: HashMap<TypeId, Type>,
}

impl Types {
    /// Those of a program, from its file.
    pub(crate) fn of(program: &[u8]) -> Result<Self> {
        let program: &'static [u8] = Vec::leak(program.to_vec());
        let file = object::File::parse(program)?;
        let dwarf = gimli::Dwarf::load(|section| {
            let data = file.section_by_name(section.name()).and_then(|section| section.data().ok());
            Ok::<_, gimli::Error>(EndianSlice::new(data.unwrap_or_default(), LittleEndian))
        })?;
        let mut units = Vec::new();
        let mut headers = dwarf.units();
        while let Some(header) = headers.next()? {
            units.push(dwarf.unit(header)?);
        }
        Ok(Types { dwarf, units, known: HashMap::new() })
    }

    /// The type of this name, without its modules.
    fn find(&self, name: &str) -> Result<TypeId> {
        for (index, unit) in self.units.iter().enumerate() {
            let mut entries = unit.entries();
            while let Some((_, entry)) = entries.next_dfs()? {
                if entry.tag() == dw::DW_TAG_structure_type && self.name(unit, entry) == name {
                    return Ok((index, entry.offset()));
                }
            }
        }
        Err(anyhow!("no debug information about {name}: build with the profile `sharing`"))
    }

    fn name(&self, unit: &Unit, entry: &Entry<'_>) -> String {
        let name = entry.attr_value(dw::DW_AT_name).ok().flatten();
        let name = name.and_then(|name| self.dwarf.attr_string(unit, name).ok());
        name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
    }

    fn type_of(&self, index: usize, entry: &Entry<'_>) -> Option<TypeId> {
        match entry.attr_value(dw::DW_AT_type).ok()?? {
            AttributeValue::UnitRef(offset) => Some((index, offset)),
            AttributeValue::DebugInfoRef(offset) => {
                let find = |unit: &Unit| offset.to_unit_offset(&unit.header);
                self.units.iter().enumerate().find_map(|(index, unit)| Some((index, find(unit)?)))
            }
            _ => None,
        }
    }

    /// What is known of a type.
    fn get(&mut self, id: TypeId) -> Result<&Type> {
        if !self.known.contains_key(&id) {
            let known = self.read(id)?;
            self.known.insert(id, known);
        }
        Ok(&self.known[&id])
    }

    fn read(&self, (index, offset): TypeId) -> Result<Type> {
        let unit = &self.units[index];
        let number =
            |entry: &Entry<'_>, what: DwAt| entry.attr(what).ok().flatten().and_then(|attr| attr.udata_value());
        let mut tree = unit.entries_tree(Some(offset))?;
        let root = tree.root()?;
        let entry = root.entry();
        let mut found = Type { name: self.name(unit, entry), ..Type::default() };
        found.size = number(entry, dw::DW_AT_byte_size).unwrap_or(0);
        let (tag, to) = (entry.tag(), self.type_of(index, entry));
        match tag {
            dw::DW_TAG_pointer_type => (found.size, found.pointee) = (8, to),
            dw::DW_TAG_array_type | dw::DW_TAG_structure_type => {
                let mut children = root.children();
                while let Some(child) = children.next()? {
                    let entry = child.entry();
                    let field = |entry: &Entry<'_>| {
                        let at = number(entry, dw::DW_AT_data_member_location).unwrap_or(0);
                        Some((self.name(unit, entry), at, self.type_of(index, entry)?))
                    };
                    match entry.tag() {
                        dw::DW_TAG_member => found.fields.extend(field(entry)),
                        dw::DW_TAG_subrange_type => {
                            let count = number(entry, dw::DW_AT_count).or(number(entry, dw::DW_AT_upper_bound));
                            found.element = to.zip(count);
                        }
                        // What an option has, if it has something: what is no pointer then leads nowhere.
                        dw::DW_TAG_variant_part if found.name.starts_with("Option<") => {
                            let mut variants = child.children();
                            while let Some(variant) = variants.next()? {
                                let mut members = variant.children();
                                while let Some(member) = members.next()? {
                                    let entry = member.entry();
                                    if entry.tag() == dw::DW_TAG_member && self.name(unit, entry) == "Some" {
                                        found.fields.extend(field(entry));
                                    }
                                }
                            }
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
        Ok(found)
    }

    /// Bytes of a type.
    fn size(&mut self, id: TypeId) -> Result<u64> {
        let (size, element) = {
            let known = self.get(id)?;
            (known.size, known.element)
        };
        match element {
            Some((element, count)) if size == 0 => Ok(self.size(element)? * count),
            _ => Ok(size),
        }
    }

    /// The path to the word at an offset of a type.
    fn path(&mut self, id: TypeId, offset: u64) -> Result<String> {
        let known = self.get(id)?;
        if let Some((element, count)) = known.element {
            let size = self.size(element)?.max(1);
            return Ok(format!("{}{}", index(offset / size, count), self.path(element, offset % size)?));
        }
        let fields: Vec<_> = known.fields.clone();
        for (name, at, field) in fields {
            let size = self.size(field)?;
            if (at..at + size).contains(&offset) {
                let rest = self.path(field, offset - at)?;
                return Ok(if is_wrapper(&name) { rest } else { format!(".{name}{rest}") });
            }
        }
        Ok(String::new())
    }
}

/// Fields that say nothing.
fn is_wrapper(name: &str) -> bool {
    name.starts_with("__") || matches!(name, "v" | "value" | "pointer" | "p" | "Some" | "inner" | "data_ptr" | "data")
}

/// An element's number, of so many.
fn index(number: u64, count: u64) -> String {
    if count <= SHORT { format!("[{number}]") } else { "[..]".into() }
}

/// An object that was found.
struct Found {
    bytes: u64,
    path: String,
    kind: Kind,
}

enum Kind {
    One(TypeId),
    Slice(TypeId, u64),
    Named,
}

/// A traced program's words.
pub(crate) struct Words<'t> {
    types: &'t mut Types,
    memory: Option<File>,
    found: BTreeMap<u64, Found>,
}

impl<'t> Words<'t> {
    /// Of a program, none of whose memory can be read yet.
    pub(crate) fn new(types: &'t mut Types) -> Self {
        Words { types, memory: None, found: BTreeMap::new() }
    }

    /// From here on that of a process, which executes no other program any more.
    pub(crate) fn open(&mut self, pid: u32) -> Result<()> {
        let path = format!("/proc/{pid}/mem");
        self.memory = Some(File::open(&path).with_context(|| format!("cannot read {path}"))?);
        Ok(())
    }

    /// Another machine begins.
    pub(crate) fn forget(&mut self) {
        self.found.clear();
    }

    /// The number at an address.
    pub(crate) fn word(&self, address: u64) -> Option<u64> {
        let mut word = [0; 8];
        self.memory.as_ref()?.read_exact_at(&mut word, address).ok()?;
        Some(u64::from_le_bytes(word))
    }

    /// Some bytes are called so, unless they have a name.
    pub(crate) fn name(&mut self, address: u64, bytes: u64, path: &str) {
        self.found.entry(address).or_insert(Found { bytes, path: path.into(), kind: Kind::Named });
    }

    /// Finds what can be reached from the value of type `name` at an address; nearest first, so that paths are short.
    pub(crate) fn look(&mut self, name: &str, address: u64) -> Result<()> {
        let root = self.types.find(name)?;
        let (mut queue, mut seen) = (VecDeque::from([(root, address, String::new())]), HashSet::new());
        while let Some((id, at, path)) = queue.pop_front() {
            if !seen.insert((id, at)) {
                continue;
            }
            let known = self.types.get(id)?;
            let (name, pointee, element, fields) =
                (known.name.clone(), known.pointee, known.element, known.fields.clone());
            if let Some((element, count)) = element {
                let size = self.types.size(element)?;
                for number in 0..if count <= SHORT { count } else { 0 } {
                    queue.push_front((element, at + number * size, format!("{path}{}", index(number, count))));
                }
            } else if let Some(to) = pointee {
                let size = self.types.size(to)?;
                if let Some(target) = self.word(at).filter(|target| size > 1 && self.word(*target).is_some()) {
                    let found = Found { bytes: size, path: path.clone(), kind: Kind::One(to) };
                    self.found.entry(target).or_insert(found);
                    queue.push_back((to, target, path));
                }
            } else if let (true, [(_, _, data), (length, ..)]) = (name.starts_with(['&', '*']), &fields[..])
                && length == "length"
            {
                let (Some(start), Some(count)) = (self.word(at), self.word(at + 8)) else { continue };
                let Some(element) = self.types.get(*data)?.pointee else { continue };
                let size = self.types.size(element)?;
                if count > 0 && self.word(start).is_some() {
                    let found = Found { bytes: size * count, path: path.clone(), kind: Kind::Slice(element, count) };
                    self.found.entry(start).or_insert(found);
                    for number in 0..if count <= SHORT { count } else { 0 } {
                        queue.push_back((element, start + number * size, format!("{path}{}", index(number, count))));
                    }
                }
            } else {
                for (name, offset, field) in fields {
                    let dot = if path.is_empty() { "" } else { "." };
                    let path = if is_wrapper(&name) { path.clone() } else { format!("{path}{dot}{name}") };
                    queue.push_front((field, at + offset, path));
                }
            }
        }
        Ok(())
    }

    /// What a word is called; `None` if it is nobody's.
    pub(crate) fn of_word(&mut self, address: u64) -> Result<Option<String>> {
        // Small objects in large ones come first.
        let mut named = None;
        for (start, found) in self.found.range(..=address).rev().take(4096) {
            if address < start + found.bytes {
                named = Some((*start, found));
                break;
            }
        }
        let Some((start, found)) = named else { return Ok(None) };
        let offset = address - start;
        let path = found.path.clone();
        Ok(Some(match found.kind {
            Kind::Named => path,
            Kind::One(id) => format!("{path}{}", self.types.path(id, offset)?),
            Kind::Slice(element, count) => {
                let size = self.types.size(element)?.max(1);
                format!("{path}{}{}", index(offset / size, count), self.types.path(element, offset % size)?)
            }
        }))
    }
}
