-- Enters queues, keeps positions there alive, or moves them from another name with their ticket.
--
-- $1 owners   $2 names   $3 ends of the liveness   $4 reserved times in ms   $5 process
-- → owner, ticket
INSERT INTO {waiters} (owner, name, alive_until, reserve_ms, process)
  SELECT c.owner, c.name, 'epoch'::timestamptz + c.alive_until * interval '1 microsecond', c.reserve_ms, $5::text
  FROM unnest($1::text[], $2::bytea[], $3::bigint[], $4::integer[])
    WITH ORDINALITY AS c(owner, name, alive_until, reserve_ms, number)
  ORDER BY c.number
ON CONFLICT (owner) DO UPDATE SET name = excluded.name, alive_until = excluded.alive_until,
  reserve_ms = excluded.reserve_ms, process = excluded.process, is_called = false
RETURNING owner, ticket
