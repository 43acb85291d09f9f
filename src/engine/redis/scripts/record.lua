-- Stores the record of a grant that was made by plain commands, if the lease is still held.
--
-- KEYS    1  the lock key
--         2  its fence companion
-- ARGV    1  what the lock key holds: the owner's token, on a node of a quorum with the round
--         2  the fencing token
--         3  the process id (and on a node of a quorum a colon and the round), a space, and the host
--         4  how much longer than the lease a fence companion lasts, in ms
--         5  the ttl with which it was granted, in ms
--         6  the time of the grant in ms since 1970: on a node of a quorum, so that all nodes have the same
-- Answer  1 when the record was stored, else 0

if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
local left, since = redis.call('PTTL', KEYS[1]), ARGV[6]
if not since then
  local now = redis.call('TIME')
  since = now[1] * 1000 + math.floor(now[2] / 1000)
  if left >= 0 and left < tonumber(ARGV[5]) then
    -- It was granted a while ago.
    since = since - (ARGV[5] - left)
  end
end
local record = string.format('%s %s %.0f %s', ARGV[2], string.match(ARGV[1], '^%x+'), since, ARGV[3])
redis.call('SET', KEYS[2], record, 'PX', math.max(left, 0) + ARGV[4])
return 1
