//! What is free, as text: every block is in one column, and blocks of less than 2 MiB in the line of their mobility too.

use super::request;
use super::support::{arena, with_arenas};
use hugemm_base::NodeId;

#[test]
fn what_is_free_is_told_by_node_order_and_mobility() {
    with_arenas(&[arena(0, 2048, 0), arena(2048, 512, 1)], 1, &[NodeId::new(0)], |frames, _, cx| {
        let unmovable = frames.alloc(&cx, request(5)).expect("memory");
        let movable = frames.alloc(&cx, request(7).movable()).expect("memory");
        let mut text = String::new();
        frames.dump(&cx, &mut text).expect("a string takes everything");
        let columns = |counts: &[u64]| counts.iter().map(|count| format!(" {count:>6}")).collect::<String>();
        let orders: Vec<u64> = (0..19).collect();
        let lines = [
            format!("order              {}", columns(&orders)),
            format!("node   0           {}", columns(&[0, 0, 0, 0, 0, 1, 1, 2, 2, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0])),
            format!("node   0, unmovable{}", columns(&[0, 0, 0, 0, 0, 1, 1, 1, 1])),
            format!("node   0, movable  {}", columns(&[0, 0, 0, 0, 0, 0, 0, 1, 1])),
            "node   0, pages: 1888 free, 0 cached, 0 deferred, 0 isolated, 0 refused".into(),
            format!("node   1           {}", columns(&[0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0])),
            format!("node   1, unmovable{}", columns(&[0; 9])),
            format!("node   1, movable  {}", columns(&[0; 9])),
            "node   1, pages: 512 free, 0 cached, 0 deferred, 0 isolated, 0 refused".into(),
        ];
        assert_eq!(text.lines().collect::<Vec<_>>(), lines);
        frames.free(&cx, unmovable);
        frames.free(&cx, movable);
    });
}
