//! The load of agents that learn: each creates a sandbox, runs commands with time to think in between, forks it, and kills
//! all of it, again and again, many of them at once.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{Findings, forks, forks::fork, plot::plot, run::Run, series::Series};

/// Children of the fork.
const CHILDREN: u32 = 2;
/// Buckets over the time of the run.
const BUCKETS: f64 = 20.0;
/// How long an agent waits that was refused, or whose create failed.
const AGAIN: Duration = Duration::from_secs(1);

struct Operations {
    create: Series,
    command: Series,
    fork: Series,
    kill: Series,
}

pub(super) async fn run(run: &Run, agents: u32, seconds: u64) -> Findings {
    let operations = Operations {
        create: Series::new("create .. first command"),
        command: Series::new("command round trip"),
        fork: Series::new(format!("fork {CHILDREN} .. all answer")),
        kill: Series::new("kill"),
    };
    run.say(format!("{agents} agents for {seconds} s"));
    let began = Instant::now();
    let until = began + Duration::from_secs(seconds);
    let lives = (0..agents).map(|agent| {
        let operations = &operations;
        async move {
            let mut answered = 0;
            for life in 0.. {
                answered += live(run, operations, agent, life).await;
                if Instant::now() >= until {
                    break;
                }
            }
            answered
        }
    });
    let answered = futures::future::join_all(lives).await.into_iter().sum();

    let Operations { create, command, fork, kill } = &operations;
    let width = (seconds as f64 / BUCKETS).max(1.0);
    let plots =
        [(create, "create"), (command, "command"), (fork, "fork"), (kill, "kill")].map(|(series, name)| {
            let lines = [50, 90, 99].map(|percent| {
            json!({ "name": format!("p{percent}"), "points": series.over_time(began, width, percent) })
        });
            plot(&format!("{name} over time"), "s", "ms", &lines)
        });
    let floors = run.floors();
    let rows = vec![
        create.row(floors, Some(("launch", 1.0))),
        command.row(floors, Some(("http", 1.0))),
        forks::row(fork, floors, answered),
        kill.row(floors, None),
    ];
    Findings { rows, plots: plots.to_vec() }
}

/// One life of an agent, to its end even when the time is over; how many children answered.
async fn live(run: &Run, operations: &Operations, agent: u32, life: u32) -> usize {
    let Some(sandbox) = operations.create.time(run.ready(run.template())).await else {
        tokio::time::sleep(AGAIN).await;
        return 0;
    };
    for step in 0..commands(agent, life) {
        tokio::time::sleep(think(agent, life, step)).await;
        operations.command.time(run.command(&sandbox)).await;
    }
    let mut all = fork(run, &operations.fork, &sandbox, CHILDREN).await;
    let answered = all.len();
    all.push(sandbox);
    for sandbox in &all {
        operations.kill.time(run.kill(sandbox)).await;
    }
    answered
}

/// Commands of a life: 5 to 20, different from agent to agent and from life to life, and the same in every run.
fn commands(agent: u32, life: u32) -> u32 {
    5 + agent.wrapping_mul(7).wrapping_add(life.wrapping_mul(5)) % 16
}

/// Time to think before a command: 50 to 449 ms.
fn think(agent: u32, life: u32, step: u32) -> Duration {
    let mixed =
        agent.wrapping_mul(131).wrapping_add(life.wrapping_mul(61)).wrapping_add(step.wrapping_mul(173));
    Duration::from_millis(50 + u64::from(mixed % 400))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lives_differ_within_their_bounds() {
        let all: std::collections::BTreeSet<u32> =
            (0..8).flat_map(|agent| (0..8).map(move |life| commands(agent, life))).collect();
        assert_eq!((all.first(), all.last()), (Some(&5), Some(&20)));
        assert!(think(u32::MAX, 3, 9) < Duration::from_millis(450));
    }
}
