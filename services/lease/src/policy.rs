//! Who may lease how much: a line per user or group.
//!
//! ```text
//! # who   how much   nodes (all, if none are named)
//! uid 1000  64G
//! gid 36    512G     0,1
//! ```
//!
//! The first line that names the asker decides; what it allows is for all that it names together. Root and the daemon's own user need no
//! line; a `uid` line that names them is for them, too, and takes their commands from them. Nobody else gets anything.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Who asks, as the kernel vouches for it (SO_PEERCRED).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asker {
    /// User.
    pub uid: u32,
    /// Primary group.
    pub gid: u32,
    /// The others.
    pub groups: Vec<u32>,
}

impl Asker {
    /// A user that is in the group of its own number alone.
    pub fn user(uid: u32) -> Self {
        Asker { uid, gid: uid, groups: Vec::new() }
    }
}

/// Whom a line is about: all that lease by it have together what it allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Who {
    /// A user by its number.
    User(u32),
    /// All of a group.
    Group(u32),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    who: Who,
    bytes: u64,
    nodes: Vec<u32>,
}

/// The rules of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LendingPolicy {
    owner: u32,
    rules: Vec<Rule>,
}

/// A line that says nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("policy, line {line}: {what}; a line is `uid N SIZE [NODE,…]` or `gid N SIZE [NODE,…]`")]
pub struct PolicyError {
    /// Counted from 1.
    pub line: usize,
    /// What is wrong.
    pub what: String,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No line names the asker.
    NotNamed,
    /// More than the line allows, with what it has given already.
    Quota {
        /// The line's bytes.
        allowed: u64,
        /// What is leased by it.
        has: u64,
    },
    /// Not this node.
    Node,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NotNamed => f.write_str("no line of the daemon's policy names this user or its group"),
            Refusal::Quota { allowed, has } => {
                write!(f, "the policy allows this user or its group {allowed} bytes, and it has {has} leased already")
            }
            Refusal::Node => f.write_str("the policy does not allow this user that node"),
        }
    }
}

impl LendingPolicy {
    /// Only root and `owner`, the daemon's user.
    pub fn closed(owner: u32) -> Self {
        LendingPolicy { owner, rules: Vec::new() }
    }

    /// Reads the lines; `size` reads a size (`64G`).
    ///
    /// # Errors
    ///
    /// [`PolicyError`]: the first line that is not one.
    pub fn read(owner: u32, text: &str, size: impl Fn(&str) -> Option<u64>) -> Result<Self, PolicyError> {
        let mut rules = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let wrong = |what: &str| PolicyError { line: number + 1, what: what.to_owned() };
            let mut words = line.split('#').next().unwrap_or_default().split_whitespace();
            let Some(kind) = words.next() else { continue };
            let id =
                words.next().and_then(|id| id.parse().ok()).ok_or_else(|| wrong("no number of a user or group"))?;
            let who = match kind {
                "uid" => Who::User(id),
                "gid" => Who::Group(id),
                _ => return Err(wrong("neither uid nor gid")),
            };
            let bytes = words.next().and_then(&size).ok_or_else(|| wrong("no size"))?;
            let nodes = words.next().map_or(Ok(Vec::new()), |nodes| nodes.split(',').map(str::parse).collect());
            let nodes = nodes.map_err(|_| wrong("nodes are numbers with commas between them"))?;
            if words.next().is_some() {
                return Err(wrong("too many words"));
            }
            rules.push(Rule { who, bytes, nodes });
        }
        Ok(LendingPolicy { owner, rules })
    }

    /// Root and the daemon's own user, unless a `uid` line names them: the root of a container is the daemon's.
    pub fn is_owner(&self, asker: &Asker) -> bool {
        let names = |rule: &Rule| rule.who == Who::User(asker.uid);
        (asker.uid == 0 || asker.uid == self.owner) && !self.rules.iter().any(names)
    }

    /// Whether anything is said of `asker`.
    ///
    /// # Errors
    ///
    /// [`Refusal::NotNamed`].
    pub fn names(&self, asker: &Asker) -> Result<(), Refusal> {
        if self.is_owner(asker) { Ok(()) } else { self.rule(asker).map(drop) }
    }

    /// Whose what `asker` leases is.
    pub fn account(&self, asker: &Asker) -> Who {
        match self.rule(asker) {
            Ok(rule) if !self.is_owner(asker) => rule.who,
            _ => Who::User(asker.uid),
        }
    }

    fn rule(&self, asker: &Asker) -> Result<&Rule, Refusal> {
        let named = |rule: &&Rule| match rule.who {
            Who::User(uid) => uid == asker.uid,
            Who::Group(gid) => gid == asker.gid || asker.groups.contains(&gid),
        };
        self.rules.iter().find(named).ok_or(Refusal::NotNamed)
    }

    /// Whether `asker`, by whose line `has` bytes are leased, may have `bytes` more, of `node` if a node is known.
    ///
    /// # Errors
    ///
    /// [`Refusal`].
    pub fn allows(&self, asker: &Asker, bytes: u64, has: u64, node: Option<u32>) -> Result<(), Refusal> {
        if self.is_owner(asker) {
            return Ok(());
        }
        let rule = self.rule(asker)?;
        if !rule.nodes.is_empty() && node.is_none_or(|node| !rule.nodes.contains(&node)) {
            return Err(Refusal::Node);
        }
        match has.checked_add(bytes) {
            Some(sum) if sum <= rule.bytes => Ok(()),
            _ => Err(Refusal::Quota { allowed: rule.bytes, has }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> Result<LendingPolicy, PolicyError> {
        LendingPolicy::read(7, text, |size| size.strip_suffix('G')?.parse::<u64>().ok().map(|n| n << 30))
    }

    #[test]
    fn the_first_line_that_names_the_asker_decides() {
        let policy = policy("# all\nuid 1000 4G 0\n\ngid 36 8G # libvirt\nuid 1000 99G").expect("valid");
        let user = &Asker { uid: 1000, gid: 36, groups: vec![] };
        assert_eq!(policy.allows(user, 4 << 30, 0, Some(0)), Ok(()));
        assert_eq!(policy.allows(user, 4 << 30, 1, Some(0)), Err(Refusal::Quota { allowed: 4 << 30, has: 1 }));
        assert_eq!(policy.allows(user, u64::MAX, 1, Some(0)), Err(Refusal::Quota { allowed: 4 << 30, has: 1 }));
        assert_eq!(policy.allows(user, 1, 0, Some(1)), Err(Refusal::Node));
        assert_eq!(policy.allows(user, 1, 0, None), Err(Refusal::Node), "an unknown node may be any");
        assert_eq!(policy.allows(&Asker { uid: 5, gid: 5, groups: vec![7, 36] }, 8 << 30, 0, None), Ok(()));
        assert_eq!(policy.allows(&Asker::user(5), 1, 0, None), Err(Refusal::NotNamed));
        for uid in [0, 7] {
            assert_eq!(policy.allows(&Asker::user(uid), u64::MAX, 1, None), Ok(()));
        }
    }

    /// Of a container, say, whose root is the daemon's.
    #[test]
    fn a_line_for_root_binds_it() {
        let bound = policy("uid 0 4G\nuid 7 1G").expect("valid");
        let free = policy("gid 0 4G\ngid 7 1G").expect("valid");
        for (uid, allowed) in [(0, 4 << 30), (7, 1 << 30)] {
            let (asker, who) = (&Asker::user(uid), Who::User(uid));
            assert_eq!(bound.allows(asker, allowed, 1, None), Err(Refusal::Quota { allowed, has: 1 }));
            assert_eq!((bound.names(asker), bound.account(asker), bound.is_owner(asker)), (Ok(()), who, false));
            assert_eq!(free.allows(asker, allowed, 1, None), Ok(()), "its groups are others', too");
            assert_eq!((free.account(asker), free.is_owner(asker)), (who, true));
        }
    }

    #[test]
    fn a_wrong_line_is_named() {
        for (text, line) in [("uid x 1G", 1), ("\nwho 1 1G", 2), ("uid 1", 1), ("uid 1 1G a", 1), ("uid 1 1G 0 1", 1)] {
            assert_eq!(policy(text).expect_err(text).line, line, "{text}");
        }
    }
}
