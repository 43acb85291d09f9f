-- Writes shares: removes those that were released, and never shortens the lease of an owner: it may have been renewed since it was read.
--
-- $1 names   $2 owners (NULL: released)   $3 ends of the leases   $4 fences   $5 whether each is a grant
-- $6 hosts (NULL: unchanged)   $7 pids   $8 metadata   $9 permits   $10 their limits
WITH c AS MATERIALIZED (
  SELECT * FROM unnest($1::bytea[], $2::text[], $3::bigint[], $4::bigint[], $5::boolean[], $6::text[], $7::bigint[], $8::text[],
    $9::integer[], $10::integer[]) AS c(name, owner, expires_at, fence, is_granted, host, pid, metadata, permits, permit_limit)
), gone AS (
  DELETE FROM {locks} AS l USING c WHERE l.name = c.name AND c.owner IS NULL
)
INSERT INTO {locks} AS l (name, owner, expires_at, fence, since, host, pid, metadata, permits, permit_limit)
  SELECT name, owner, 'epoch'::timestamptz + expires_at * interval '1 microsecond', fence,
    CASE WHEN is_granted THEN clock_timestamp() END, host, pid, metadata, permits, permit_limit
  FROM c WHERE owner IS NOT NULL
ON CONFLICT (name) DO UPDATE SET
  owner = excluded.owner,
  expires_at = greatest(excluded.expires_at, CASE WHEN l.owner = excluded.owner THEN l.expires_at END),
  fence = excluded.fence,
  since = coalesce(excluded.since, l.since),
  host = coalesce(excluded.host, l.host),
  pid = coalesce(excluded.pid, l.pid),
  metadata = CASE WHEN excluded.since IS NULL THEN l.metadata ELSE excluded.metadata END
