-- Reads the first live positions of names, and the positions of owners. The rows of the names are locked: a statement that locks
-- would read the queue as it was before it waited.
--
-- $1 names   $2 owners   $3 how many positions of each name
-- → ticket, name, owner, end of the liveness, process, time of a hand-off in ms, host, pid, permits, their limit
SELECT w.ticket, w.name, w.owner, (date_part('epoch', w.alive_until) * 1e6)::bigint, w.process, w.hold_ms, w.host, w.pid,
  w.permits, w.permit_limit
FROM unnest($1::bytea[], $3::bigint[]) AS c(name, front)
CROSS JOIN LATERAL (SELECT * FROM {waiters} AS q
  WHERE q.name = c.name AND q.alive_until > clock_timestamp() ORDER BY q.ticket LIMIT c.front) AS w
UNION
SELECT w.ticket, w.name, w.owner, (date_part('epoch', w.alive_until) * 1e6)::bigint, w.process, w.hold_ms, w.host, w.pid,
  w.permits, w.permit_limit
FROM {waiters} AS w WHERE w.owner = ANY($2::text[])
