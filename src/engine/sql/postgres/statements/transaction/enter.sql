-- Enters queues, keeps positions there alive, or moves them from another name with their ticket.
--
-- $1 owners   $2 names   $3 ends of the liveness   $4 times of a hand-off in ms   $5 hosts   $6 pids (both NULL: a hand-off reserves)
-- $7 tickets of waiters that enter again   $8 process   $9 permits   $10 their limits
-- → owner, ticket
WITH c AS MATERIALIZED (
  SELECT c.owner, c.name, 'epoch'::timestamptz + c.alive_until * interval '1 microsecond' AS alive_until,
    $8::text AS process, c.hold_ms, c.host, c.pid, c.ticket, c.permits, c.permit_limit, c.number
  FROM unnest($1::text[], $2::bytea[], $3::bigint[], $4::integer[], $5::text[], $6::bigint[], $7::bigint[], $9::integer[], $10::integer[])
    WITH ORDINALITY AS c(owner, name, alive_until, hold_ms, host, pid, ticket, permits, permit_limit, number)
), again AS (
  INSERT INTO {waiters} (ticket, owner, name, alive_until, process, hold_ms, host, pid, permits, permit_limit) OVERRIDING SYSTEM VALUE
    SELECT ticket, owner, name, alive_until, process, hold_ms, host, pid, permits, permit_limit FROM c WHERE ticket IS NOT NULL
  ON CONFLICT DO NOTHING
  RETURNING owner, ticket
), entered AS (
  INSERT INTO {waiters} (owner, name, alive_until, process, hold_ms, host, pid, permits, permit_limit)
    SELECT owner, name, alive_until, process, hold_ms, host, pid, permits, permit_limit FROM c WHERE ticket IS NULL ORDER BY number
  ON CONFLICT (owner) DO UPDATE SET name = excluded.name, alive_until = excluded.alive_until,
    process = excluded.process, hold_ms = excluded.hold_ms, host = excluded.host, pid = excluded.pid
  RETURNING owner, ticket
)
SELECT owner, ticket FROM again UNION ALL SELECT owner, ticket FROM entered
