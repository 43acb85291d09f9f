export const plots = () => ({})
