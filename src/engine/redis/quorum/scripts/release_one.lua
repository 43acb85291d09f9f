-- Releases a name on this node if the owner holds it by any of its attempts, and notifies the waiters. Returns whether the owner
-- held the name, and how many connections the message has reached. This file comes before the scripts that release.
--
-- `owner`: nil for any holder.
-- `keep`: for how many ms the name stays busy, as text; '0': it is free at once.
--
-- PUBLISH comes before the writes: if the ACL forbids it, the script fails before it has changed anything. A released name is
-- marked in its fence companion, for an hour at most, so that a renewal in progress does not heal it.

local MARKED_MS = 3600000

local function release_one(key, fence, metadata, owner, to, keep)
  -- GET before DEL: a key of another type is no lock, and is not deleted.
  local holder, mine = redis.call('GET', key), (owner or '') .. '.'
  if not holder or owner and string.sub(holder, 1, #mine) ~= mine then
    return false, 0
  end
  -- Before the writes: a failure must leave the name unchanged.
  local record = redis.call('GET', fence)
  local receivers = redis.call('PUBLISH', to .. key, '')
  if keep ~= '0' then
    -- Busy for every claim, also for this owner: no attempt has such a value.
    redis.call('SET', key, owner .. '-kept', 'PX', keep)
    redis.call('PEXPIRE', metadata, keep)
    redis.call('PEXPIRE', fence, string.format('%.0f', keep + MARKED_MS))
    return true, receivers
  end
  redis.call('DEL', key, metadata)
  -- A lock that was released right after the grant has no record, and no renewal in progress.
  local number, token = string.match(record or '', '^(%d+) (%x+)')
  if number then
    redis.call('SET', fence, number .. ' ' .. (owner or token) .. '-free', 'KEEPTTL')
    if redis.call('PTTL', fence) > MARKED_MS then
      redis.call('PEXPIRE', fence, MARKED_MS)
    end
  end
  return true, receivers
end

