-- The part that attempts have in common: a grant of a row that exists, which is checked again under its lock.
-- The ttl is added in seconds: an interval with days depends on the session's time zone, in which a day may have 23 hours.
ON CONFLICT (name) DO UPDATE SET
  owner = excluded.owner,
  fence = CASE WHEN l.owner = excluded.owner AND l.expires_at > clock_timestamp() THEN l.fence
    ELSE greatest(l.fence + 1, (date_part('epoch', clock_timestamp()) * 1e6)::bigint) END,
  since = CASE WHEN l.owner = excluded.owner AND l.expires_at > clock_timestamp() THEN l.since
    ELSE clock_timestamp() END,
  expires_at = greatest(CASE WHEN l.owner = excluded.owner THEN l.expires_at END,
    clock_timestamp() + date_part('epoch', excluded.expires_at - excluded.since) * interval '1 second'),
  host = excluded.host, pid = excluded.pid, metadata = excluded.metadata
  WHERE l.queued = 0 AND (l.expires_at <= clock_timestamp() OR l.owner = excluded.owner)
