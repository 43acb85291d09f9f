-- Releases a name whose other keys are not all on the same node of a cluster, because its slot moves: without a hand-off. The
-- waiters find the name free at their next heartbeat.
--
-- KEYS    1  the lock key
-- ARGV    1  the owner's token, or nothing for any owner
--         2  how long the name stays busy, in ms; 0: it is free at once
-- Answer  1 when the owner held it, else 0

local holder, owner = redis.call('GET', KEYS[1]), ARGV[1]
local is_reserved = holder and #holder == 37 and string.sub(holder, -5) == '-next'
if holder and (holder == owner or owner == '' and not is_reserved) then
  if ARGV[2] == '0' then
    redis.call('DEL', KEYS[1])
  else
    redis.call('SET', KEYS[1], owner .. '-kept', 'PX', ARGV[2])
  end
  return 1
end
if holder == owner .. '-next' then
  redis.call('DEL', KEYS[1])
end
return 0
