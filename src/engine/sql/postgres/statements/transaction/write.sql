-- Writes the rows of names, and counts their positions again. The statements before it have changed the positions.
--
-- $1 names   $2 owners (NULL: free)   $3 ends of the leases   $4 fences   $5 whether each is a grant
-- $6 hosts (NULL: unchanged)   $7 pids   $8 metadata
UPDATE {locks} AS l SET
  owner = c.owner,
  expires_at = 'epoch'::timestamptz + c.expires_at * interval '1 microsecond',
  fence = c.fence,
  since = CASE WHEN c.is_granted OR c.owner IS NULL THEN clock_timestamp() ELSE l.since END,
  host = coalesce(c.host, l.host),
  pid = coalesce(c.pid, l.pid),
  metadata = CASE WHEN c.is_granted OR c.owner IS NULL THEN c.metadata ELSE l.metadata END,
  queued = (SELECT count(*) FROM {waiters} AS w WHERE w.name = l.name)
FROM unnest($1::bytea[], $2::text[], $3::bigint[], $4::bigint[], $5::boolean[], $6::text[], $7::bigint[], $8::text[])
  AS c(name, owner, expires_at, fence, is_granted, host, pid, metadata)
WHERE l.name = c.name
